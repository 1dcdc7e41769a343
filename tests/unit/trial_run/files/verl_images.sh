python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo data.train_files=rows/geo3k/train.parquet data.val_files=rows/geo3k/test.parquet \
    data.image_key=images data.train_batch_size=64 data.max_prompt_length=1024 data.max_response_length=2048 \
    data.filter_overlong_prompts=True actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.rollout.n=5 trainer.total_training_steps=20
