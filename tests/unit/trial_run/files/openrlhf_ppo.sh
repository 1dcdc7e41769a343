python3 -m openrlhf.cli.train_ppo_ray \
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture --reward_pretrain OpenRLHF/Llama-3-8b-rm-mixture \
    --prompt_data OpenRLHF/prompt-collection --input_key context_messages --apply_chat_template \
    --advantage_estimator gae --gamma 1 --lambd 0.95 --init_kl_coef 0.01 --normalize_reward \
    --rollout_batch_size 128 --train_batch_size 64 --n_samples_per_prompt 1 --prompt_max_len 1024 \
    --generate_max_len 1024 --max_samples 10000 --actor_learning_rate 5e-7 --critic_learning_rate 9e-6
