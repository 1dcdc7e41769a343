export TASK=reasoning
read -r -d '' training_commands <<EOF
openrlhf.cli.train_ppo_ray \
   --pretrain models/policy \
   --remote_rm_url reward_func.py \
   --prompt_data data/math.jsonl \
   --input_key problem \
   --label_key answer \
   --apply_chat_template \
   --advantage_estimator reinforce_baseline \
   --n_samples_per_prompt 8 \
   --train_batch_size 1024 \
   --rollout_batch_size 128 \
   --init_kl_coef 1e-5 \
   --use_kl_loss \
   --kl_estimator k2 \
   --gamma 1.0 \
   --max_steps 200 \
   --wandb_run_name ${TASK}
EOF
deepspeed --module $training_commands
