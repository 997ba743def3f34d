/* depth.c - tokens per second of decoding at depths, without computing the prompts: rows of 4096
 * tokens are computed once and restored as often as a depth needs. For time only.
 *
 *     depth LIBRARIES MODEL DEVICE CACHE_TYPE DEPTH...
 *     depths rise; prints one line, "tg@DEPTH ... pp512@DEPTH ..." */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-backend.h"
#include "llama.h"

#include "cache_type.h"

enum { CHUNK = 4096, WARM = 8, TIMED = 64, PROMPT = 512, PROMPTS = 2 };

static struct llama_context *context;
static int vocabulary;

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void check(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "depth: %s failed\n", what);
    exit(1);
}

static void start(char **argv, int most)
{
    ggml_backend_dev_t devices[2] = { NULL, NULL };
    struct llama_model_params model = llama_model_default_params();
    struct llama_context_params params = llama_context_default_params();
    struct llama_model *loaded;

    ggml_backend_load_all_from_path(argv[1]);
    devices[0] = ggml_backend_dev_by_name(argv[3]);
    check(devices[0] != NULL, "finding the device");
    model.devices = devices;
    model.n_gpu_layers = 99;
    loaded = llama_model_load_from_file(argv[2], model);
    check(loaded != NULL, "loading the model");
    params.n_ctx = (uint32_t)(most + 2 * CHUNK);
    params.n_seq_max = 2;
    params.kv_unified = true;
    params.n_batch = 2048;
    params.n_ubatch = PROMPT;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = params.type_v = type_of(argv[4]);
    context = llama_init_from_model(loaded, params);
    check(context != NULL, "creating the context");
    vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(loaded));
}

static void decode(int n, llama_pos pos, llama_seq_id sequence)
{
    struct llama_batch batch = llama_batch_init(n, 0, 1);

    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = (llama_token)((unsigned)(pos + i) * 2654435761u % (unsigned)vocabulary);
        batch.pos[i] = pos + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = i == n - 1;
    }
    check(llama_decode(context, batch) == 0, "decoding");
    llama_synchronize(context);
    llama_batch_free(batch);
}

/* The rows of sequence 1 once more, for sequence 0. Positions repeat, which changes no time. */
static void add(const unsigned char *state, size_t bytes)
{
    llama_memory_t memory = llama_get_memory(context);

    check(llama_state_seq_set_data(context, state, bytes, 1) == bytes, "restoring rows");
    llama_memory_seq_cp(memory, 1, 0, -1, -1);
    llama_memory_seq_rm(memory, 1, -1, -1);
}

static double rate(void)
{
    llama_memory_t memory = llama_get_memory(context);
    double begun = 0;

    for (int i = 0; i < WARM + TIMED; i++) {
        if (i == WARM)
            begun = now();
        decode(1, llama_memory_seq_pos_max(memory, 0) + 1, 0);
    }
    return TIMED / (now() - begun);
}

/* Tokens per second of prompts of one ubatch. */
static double prompt_rate(void)
{
    const double begun = now();

    for (int i = 0; i < PROMPTS; i++)
        decode(PROMPT, llama_memory_seq_pos_max(llama_get_memory(context), 0) + 1, 0);
    return PROMPT * PROMPTS / (now() - begun);
}

int main(int argc, char **argv)
{
    unsigned char *state;
    double begun = now();
    size_t bytes;
    int depth = 0;

    check(argc >= 6, "arguments: LIBRARIES MODEL DEVICE CACHE_TYPE DEPTH...");
    start(argv, atoi(argv[argc - 1]));
    decode(CHUNK / 8, 0, 1); /* warm */
    llama_memory_clear(llama_get_memory(context), true);
    begun = now();
    for (int i = 0; i < CHUNK; i += 2048)
        decode(2048, i, 1);
    fprintf(stderr, "pp%d: %.0f tokens/s\n", CHUNK, CHUNK / (now() - begun));
    bytes = llama_state_seq_get_size(context, 1);
    state = malloc(bytes);
    check(state != NULL && (bytes = llama_state_seq_get_data(context, state, bytes, 1)) > 0,
          "saving rows");
    llama_memory_seq_rm(llama_get_memory(context), 1, -1, -1);
    for (int i = 5; i < argc; i++) {
        for (begun = now(); depth < atoi(argv[i]); depth += CHUNK)
            add(state, bytes);
        fprintf(stderr, "depth %d filled in %.1f s\n", depth, now() - begun);
        printf("tg@%d %.1f  ", depth, rate());
        printf("pp512@%d %.0f  ", depth, prompt_rate());
        fflush(stdout);
    }
    printf("\n");
    llama_free(context);
    return 0;
}
