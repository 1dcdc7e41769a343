python3 -m openrlhf.cli.train_ppo_ray \
    --pretrain Qwen/Qwen3-4B --remote_rm_url rewards/check.py \
    --prompt_data rows/prompts.jsonl --input_key input --label_key answer --apply_chat_template \
    --advantage_estimator reinforce_baseline --use_kl_loss --kl_estimator k3 --init_kl_coef 1e-5 \
    --rollout_batch_size 128 --train_batch_size 512 --n_samples_per_prompt 8 --prompt_max_len 1024 \
    --generate_max_len 2048 --max_samples 10000 --dynamic_filtering --dynamic_filtering_reward_range 0.0 1.0
