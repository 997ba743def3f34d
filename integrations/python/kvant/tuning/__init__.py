"""The arithmetic of `kvant tune`: it gives each layer and kv head of a model a codec, within a
budget of memory.

    safetensors, captures    read the files of `kvant capture` and `kvant eval --values`
    layer_error              the error that a codec causes in attention's output
    sensitivity              what a codec costs the model: error times weight
    store                    errors kept on disk
    allocate, mixes          the choice within a budget
    settings                 choices as settings files
    probes                   divergences measured by `kvant eval`

kvant.commands.tune is the command. Needs NumPy; tuning.md explains the method."""
