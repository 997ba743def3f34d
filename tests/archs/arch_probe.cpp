/* arch_probe.cpp - runs a tiny model of one architecture, with random weights, with a chosen cache.
 * llama.cpp's own tests/test-llama-archs.cpp makes the model.
 *
 *     arch_probe list
 *     arch_probe ARCH dense|moe DEVICE|- TYPE OUT
 *
 * DEVICE is KVANT, or - for the CPU. TYPE is the type of llama.cpp's cache: f16, q8_0 or q4_0.
 *
 * It decodes a prompt of 100 tokens in batches of 64, then 28 tokens one at a time. Then it decodes
 * a second sequence in the same cache, and 4 more tokens of the first sequence. It saves and
 * restores the state of the first sequence, and decodes one more token. OUT gets the logits of all
 * these tokens. A model without a cache, or with an encoder, gets only the prompt, in one batch.
 *
 * Exit status: 0 all worked, 3 no model, 4 no context, 5 decoding failed, 6 the state was not
 * restored. */
/* the linker drops it, and all code that needs llama.cpp's common library */
#define main archs_main
#include "test-llama-archs.cpp"
#undef main

enum { N_PROMPT = 100, N_BATCH = 64, N_DECODED = 28, N_SECOND = 50, N_MORE = 4, N_TOKENS = 160 };

struct probe {
    llama_context *context;
    FILE *out;
    size_t n_vocab;
    std::vector<llama_token> tokens;
};

static bool decode(const probe &p, int from, int n, int pos, int seq, bool encode = false)
{
    llama_batch batch = llama_batch_init(n, 0, 1);
    for (int i = 0; i < n; i++) {
        batch.token[i] = p.tokens[size_t(from + i)];
        batch.pos[i] = pos + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = 1;
    }
    batch.n_tokens = n;
    const bool ok =
        (!encode || llama_encode(p.context, batch) == 0) && llama_decode(p.context, batch) == 0;
    for (int i = 0; ok && i < n; i++) {
        const float *logits = llama_get_logits_ith(p.context, i);
        if (logits != nullptr) {
            fwrite(logits, sizeof(float), p.n_vocab, p.out);
        }
    }
    llama_batch_free(batch);
    return ok;
}

static bool decode_all(const probe &p)
{
    bool ok = decode(p, 0, N_BATCH, 0, 0) && decode(p, N_BATCH, N_PROMPT - N_BATCH, N_BATCH, 0);
    for (int i = N_PROMPT; ok && i < N_PROMPT + N_DECODED; i++) {
        ok = decode(p, i, 1, i, 0);
    }
    ok = ok && decode(p, 20, N_SECOND, 0, 1);
    for (int i = N_PROMPT + N_DECODED; ok && i < N_PROMPT + N_DECODED + N_MORE; i++) {
        ok = decode(p, i, 1, i, 0);
    }
    return ok;
}

static bool restore(const probe &p)
{
    const int n = N_PROMPT + N_DECODED + N_MORE;
    std::vector<uint8_t> state(llama_state_seq_get_size(p.context, 0));
    const size_t size = llama_state_seq_get_data(p.context, state.data(), state.size(), 0);
    llama_memory_clear(llama_get_memory(p.context), true);
    return llama_state_seq_set_data(p.context, state.data(), size, 0) == size &&
           decode(p, n, 1, n, 0);
}

static int run(const probe &p, bool encode)
{
    if (encode || llama_get_memory(p.context) == nullptr) {
        puts(encode ? "encoder" : "no memory");
        return decode(p, 0, N_PROMPT, 0, 0, encode) ? 0 : 5;
    }
    return !decode_all(p) ? 5 : restore(p) ? 0 : 6;
}

static int list()
{
    for (const llm_arch &arch : llm_arch_all()) {
        if (arch == LLM_ARCH_UNKNOWN) {
            continue;
        }
        for (int moe = moe_mandatory(arch); moe <= int(moe_implemented(arch)); moe++) {
            printf("%s %s\n", llm_arch_name(arch), moe ? "moe" : "dense");
        }
    }
    return 0;
}

static llama_context_params context_params(const char *type, bool whole)
{
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 512;
    params.n_seq_max = 2;
    params.kv_unified = true;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED; /* kvant exec sets this, too */
    params.n_threads = params.n_threads_batch = 1;
    if (!whole) { /* an encoder sees its whole batch at once */
        params.n_ubatch = N_BATCH;
    }
    if (strcmp(type, "f16") != 0) {
        params.type_k = params.type_v = strcmp(type, "q8_0") == 0 ? GGML_TYPE_Q8_0 : GGML_TYPE_Q4_0;
    }
    return params;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "list") == 0) {
        return list();
    }
    if (argc != 6) {
        return 2;
    }
    const llm_arch arch = llm_arch_from_string(argv[1]);
    const std::string name = argv[1];
    const char *const whole_batch[] = { "bert", "embedding", "t5", "dream", "llada", "rnd1" };
    bool encoder = false;
    for (const char *part : whole_batch) {
        encoder = encoder || name.find(part) != name.npos;
    }
    ggml_backend_load_all();
    ggml_backend_dev_t devices[2] = { nullptr, nullptr };
    llama_model_params params = llama_model_default_params();
    params.progress_callback = silent_model_load_progress;
    params.devices = devices;
    params.n_gpu_layers = 99;
    if (strcmp(argv[3], "-") != 0 && (devices[0] = ggml_backend_dev_by_name(argv[3])) == nullptr) {
        return 2;
    }
    gguf_context_ptr metadata = get_gguf_ctx(arch, strcmp(argv[2], "moe") == 0);
    if (arch == LLM_ARCH_GEMMA4) { /* the test leaves Gemma 4 out: its pattern must be a list */
        const uint32_t windows[] = { 1, 1, 1, 1, 0 };
        const char *key = "gemma4.attention.sliding_window_pattern";
        gguf_set_arr_data(metadata.get(), key, GGUF_TYPE_UINT32, windows, 5);
    }
    tensor_data_params data = { 1234, 0.1f };
    llama_model_ptr model(
        llama_model_init_from_user(metadata.get(), set_tensor_data, &data, params));
    if (!model) {
        return 3;
    }
    llama_context_ptr context(llama_init_from_model(model.get(), context_params(argv[4], encoder)));
    if (!context) {
        return 4;
    }
    const uint32_t n_vocab = uint32_t(llama_vocab_n_tokens(llama_model_get_vocab(model.get())));
    probe p = { context.get(), fopen(argv[5], "wb"), n_vocab, get_tokens(N_TOKENS, 128, 77) };
    if (p.out == nullptr) {
        return 2;
    }
    const int status = run(p, arch == LLM_ARCH_T5);
    fclose(p.out);
    return status;
}
