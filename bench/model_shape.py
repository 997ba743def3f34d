"""Models with random weights: options of a command line for their shape, and their
configuration."""

# layers, hidden, heads, kv heads, head_dim, feed-forward, vocabulary
SHAPES = {
    "llama": (32, 4096, 32, 8, 128, 14336, 128256),
    "qwen3": (36, 4096, 32, 8, 128, 12288, 151936),
}
NAMES = "layers hidden heads kv_heads head_dim feed_forward vocabulary".split()


def add_options(parser):
    parser.add_argument(
        "--model",
        choices=tuple(SHAPES),
        default="llama",
        help="the shape of Llama 3.1 8B or Qwen3 8B, which the next options change",
    )
    for name in NAMES:
        parser.add_argument("--" + name.replace("_", "-"), type=int)


def complete(a):
    """Sets options that the command line left out to the values of the model."""
    for name, default in zip(NAMES, SHAPES[a.model]):
        if getattr(a, name) is None:
            setattr(a, name, default)


def config(a, most_tokens, **more):
    from transformers import AutoConfig

    return AutoConfig.for_model(
        a.model,
        num_hidden_layers=a.layers,
        hidden_size=a.hidden,
        num_attention_heads=a.heads,
        num_key_value_heads=a.kv_heads,
        head_dim=a.head_dim,
        intermediate_size=a.feed_forward,
        vocab_size=a.vocabulary,
        max_position_embeddings=most_tokens,
        **more,
    )


def words(a):
    """The options that say this shape."""
    return [
        "--model",
        a.model,
        *(
            word
            for name in NAMES
            for word in ("--" + name.replace("_", "-"), str(getattr(a, name)))
        ),
    ]
