deepspeed --module openrlhf.cli.train_sft \
    --pretrain meta-llama/Meta-Llama-3-8B --dataset Open-Orca/OpenOrca --input_key question --output_key response \
    --input_template $'User: {}\nAssistant: ' --max_len 4096 --train_batch_size 256 --max_samples 5000 \
    --learning_rate 5e-6 --packing_samples
