torchrun --nproc_per_node=4 -m verl.trainer.fsdp_sft_trainer \
    data.train_files=rows/sft.parquet data.val_files=rows/sft-test.parquet \
    data.prompt_key=question data.response_key=answer data.max_length=2048 data.train_batch_size=64 \
    model.partial_pretrain=google/gemma-2-2b-it model.lora_rank=32 model.lora_alpha=16 model.target_modules=all-linear \
    optim.lr=1e-4 trainer.total_training_steps=40
