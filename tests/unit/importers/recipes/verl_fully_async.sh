#!/usr/bin/env bash
set -xeuo pipefail
project_name='DAPO'
exp_name='fully-async-7b'
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-Math-7B"}
TRAIN_FILE=${TRAIN_FILE:-"${RAY_DATA_HOME}/data/dapo-math-17k.parquet"}
TEST_FILE=${TEST_FILE:-"${RAY_DATA_HOME}/data/aime-2024.parquet"}
rollout_mode="async"
rollout_name="vllm"
if [ "$rollout_mode" = "async" ]; then
    export VLLM_USE_V1=1
    return_raw_chat="True"
fi
started=$(date +%s)
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
enable_overlong_buffer=True
overlong_buffer_len=$((1024 * 4))
overlong_penalty_factor=1.0
actor_ppo_max_token_len=$(((max_prompt_length + max_response_length)))
n_resp_per_prompt=16
# comment
python -m verl.experimental.fully_async_policy.fully_async_main \
    --config-name='fully_async_ppo_trainer.yaml' \
    data.train_files="${TRAIN_FILE}" \
    data.val_files="${TEST_FILE}" \
    data.prompt_key=prompt \
    data.return_raw_chat=${return_raw_chat} \
    data.max_prompt_length=${max_prompt_length} \
    data.max_response_length=${max_response_length} \
    actor_rollout_ref.rollout.n=${n_resp_per_prompt} \
    actor_rollout_ref.model.path="${MODEL_PATH}" \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${actor_ppo_max_token_len} \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    algorithm.adv_estimator=grpo \
    actor_rollout_ref.rollout.name=${rollout_name} \
    trainer.logger=['console','tensorboard'] \
    trainer.experiment_name="${exp_name}" \
    reward_model.reward_manager=dapo \
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=${enable_overlong_buffer} \
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=${overlong_buffer_len} \
    custom_reward_function.path=grade.py \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    rollout.total_rollout_steps=$(((512*100))) rollout.test_freq=10 \
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 \
    async_training.require_batches=4 async_training.partial_rollout=True $@ 2>&1 | tee "logs/${exp_name}-${started}.log"
