"""What `kvant tune` computes: which codec each layer and kv head of a model gets within a budget of memory.

    safetensors, captures    read what `kvant capture` and `kvant eval --values` keep
    layer_error              the error that a codec causes in attention's output
    sensitivity              what a codec costs the model: error times weight
    store                    errors kept on disk
    allocate, mixes          the choice within a budget
    settings                 choices as settings files
    probes                   divergences measured by `kvant eval`

kvant.commands.tune is the command. Needs NumPy; tuning.md explains the method."""
