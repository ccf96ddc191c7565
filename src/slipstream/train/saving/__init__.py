"""What an engine saves and loads: checkpoints, Hugging Face and PEFT folders, optimizer states."""
