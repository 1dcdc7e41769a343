python3 -m verl.experimental.fully_async_policy.fully_async_main \
    algorithm.adv_estimator=grpo data.train_files=rows/gsm8k.parquet data.val_files=rows/gsm8k-test.parquet \
    data.gen_batch_size=1 data.max_prompt_length=512 data.max_response_length=512 \
    actor_rollout_ref.hybrid_engine=False actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=8 rollout.total_rollout_steps=6400 \
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=2 \
    async_training.require_batches=1 async_training.partial_rollout=True
