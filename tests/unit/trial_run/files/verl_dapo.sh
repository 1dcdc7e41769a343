len=4096
python3 -m recipe.dapo.main_dapo \
    algorithm.adv_estimator=grpo algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.train_files=rows/dapo-math-17k.parquet data.val_files=rows/aime-2024.parquet \
    data.train_batch_size=32 data.gen_batch_size=96 data.max_prompt_length=1024 data.max_response_length=$len \
    data.truncation=left actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base \
    actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.rollout.n=16 reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True \
    reward_model.overlong_buffer.len=$((len / 4)) reward_model.overlong_buffer.penalty_factor=1.0 \
    trainer.total_training_steps=20
