python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=gae algorithm.lam=0.95 \
    data.train_files=rows/math/train.parquet data.val_files=rows/math/test.parquet \
    data.train_batch_size=128 data.max_prompt_length=1024 data.max_response_length=512 \
    actor_rollout_ref.model.path=deepseek-ai/deepseek-llm-7b-chat actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    critic.model.path=deepseek-ai/deepseek-llm-7b-chat critic.optim.lr=1e-5 trainer.critic_warmup=0 \
    trainer.total_training_steps=50
