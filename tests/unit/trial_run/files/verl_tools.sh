python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo data.train_files=rows/gsm8k.parquet data.val_files=rows/gsm8k-test.parquet \
    data.train_batch_size=32 data.max_prompt_length=1024 data.max_response_length=1024 data.return_raw_chat=True \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.name=sglang actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4 \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=verl_tools_config.yaml \
    trainer.total_training_steps=20
