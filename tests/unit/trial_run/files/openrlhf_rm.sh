deepspeed --module openrlhf.cli.train_rm \
    --pretrain OpenRLHF/Llama-3-8b-sft-mixture --dataset OpenRLHF/preference_dataset_mixture2_and_safe_pku \
    --apply_chat_template --chosen_key chosen --rejected_key rejected --max_len 4096 --train_batch_size 128 \
    --max_samples 5000 --learning_rate 9e-6
