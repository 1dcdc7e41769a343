python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=reinforce_plus_plus algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.001 \
    data.train_files=rows/gsm8k.parquet data.val_files=rows/gsm8k-test.parquet data.train_batch_size=64 \
    data.max_prompt_length=512 data.max_response_length=512 \
    actor_rollout_ref.model.path=mistralai/Mistral-Nemo-Instruct-2407 actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.rollout.n=4 trainer.total_training_steps=30
