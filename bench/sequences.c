/* sequences.c - what several sequences in one cache cost in quality: the divergence from f16 when
 * sequences take turns, next to the same sequences alone.
 *
 *     sequences LIBRARIES PLUGIN MODEL TEXT SEQUENCES CONTEXT BATCH THREADS PRESET...
 *
 * Each sequence has the next CONTEXT tokens of the text. They take turns: BATCH tokens of the first
 * one, BATCH tokens of the second one, and so on, in a cache of SEQUENCES x CONTEXT tokens. Then
 * each sequence is decoded alone, in a cache of CONTEXT tokens. The second half of each sequence is
 * scored. llama.cpp's own f16 cache on a CPU is the reference. Prints a line of CSV per preset and
 * way: preset, way, sequences, context, batch, scored tokens, mean KLD, its standard error. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend.h"
#include "llama.h"

typedef struct task {
    struct llama_model *model;
    const llama_token *tokens;
    int n_sequences, n_ctx, n_batch, n_threads, n_vocab;
    float *reference; /* n_sequences x n_ctx / 2 x n_vocab */
    double sum, squares;
    size_t n;
} task;

static void check(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "sequences: %s failed\n", what);
    exit(1);
}

static void quiet(enum ggml_log_level level, const char *message, void *data)
{
    (void)data;
    if (level == GGML_LOG_LEVEL_ERROR || strstr(message, "KV cache ") != NULL)
        fputs(message, stderr);
}

static llama_token *read_tokens(const struct llama_vocab *vocab, const char *path, size_t n)
{
    FILE *file = fopen(path, "rb");
    char *text = malloc(16 * n);
    llama_token *tokens = malloc(16 * n * sizeof(*tokens));
    int32_t found;

    check(file != NULL && text != NULL && tokens != NULL, "opening the text");
    found = llama_tokenize(vocab, text, (int32_t)fread(text, 1, 16 * n, file), tokens,
                           (int32_t)(16 * n), false, false);
    check(found >= (int32_t)n, "finding so many tokens");
    fclose(file);
    free(text);
    return tokens;
}

static double log_sum(const float *logits, int n)
{
    double most = logits[0], sum = 0;

    for (int i = 0; i < n; i++)
        most = logits[i] > most ? logits[i] : most;
    for (int i = 0; i < n; i++)
        sum += exp(logits[i] - most);
    return most + log(sum);
}

static double divergence(const float *from, const float *logits, int n)
{
    const double p = log_sum(from, n), q = log_sum(logits, n);
    double sum = 0;

    for (int i = 0; i < n; i++)
        sum += exp(from[i] - p) * ((from[i] - p) - (logits[i] - q));
    return sum;
}

/* Decodes a batch of a sequence, and scores its tokens or keeps their logits. */
static void decode(task *t, struct llama_context *context, struct llama_batch *batch, int sequence,
                   int as, int at, bool scores)
{
    const int half = t->n_ctx / 2;

    batch->n_tokens = t->n_ctx - at < t->n_batch ? t->n_ctx - at : t->n_batch;
    for (int i = 0; i < batch->n_tokens; i++) {
        batch->token[i] = t->tokens[(size_t)sequence * t->n_ctx + at + i];
        batch->pos[i] = at + i;
        batch->n_seq_id[i] = 1;
        batch->seq_id[i][0] = as;
        batch->logits[i] = at + i >= half;
    }
    check(llama_decode(context, *batch) == 0, "decoding");
    for (int i = 0; i < batch->n_tokens; i++) {
        float *from =
            t->reference + ((size_t)sequence * half + (size_t)(at + i - half)) * (size_t)t->n_vocab;
        if (at + i < half)
            continue;
        const float *logits = llama_get_logits_ith(context, i);
        if (!scores) {
            memcpy(from, logits, (size_t)t->n_vocab * sizeof(*from));
            continue;
        }
        const double kld = divergence(from, logits, t->n_vocab);
        t->sum += kld;
        t->squares += kld * kld;
        t->n++;
    }
}

/* Decodes n sequences from `first` on, which take turns. */
static void run(task *t, int first, int n, bool scores)
{
    struct llama_context_params params = llama_context_default_params();
    struct llama_batch batch = llama_batch_init(t->n_batch, 0, 1);
    struct llama_context *context;

    params.n_ctx = (uint32_t)(t->n_ctx * n);
    params.n_batch = params.n_ubatch = (uint32_t)t->n_batch;
    params.n_seq_max = (uint32_t)n;
    params.kv_unified = true;
    params.n_threads = params.n_threads_batch = t->n_threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    context = llama_init_from_model(t->model, params);
    check(context != NULL, "making a context");
    for (int at = 0; at < t->n_ctx; at += t->n_batch)
        for (int s = 0; s < n; s++)
            decode(t, context, &batch, first + s, s, at, scores);
    llama_free(context);
    llama_batch_free(batch);
}

static void report(task *t, const char *preset, const char *way)
{
    const double n = (double)t->n, mean = t->sum / n;

    printf("%s,%s,%d,%d,%d,%zu,%.6g,%.3g\n", preset, way, t->n_sequences, t->n_ctx, t->n_batch,
           t->n, mean, sqrt((t->squares / n - mean * mean) / n));
    fflush(stdout);
    t->sum = t->squares = 0;
    t->n = 0;
}

static struct llama_model *load(const char *path, ggml_backend_dev_t device)
{
    struct llama_model_params params = llama_model_default_params();
    ggml_backend_dev_t devices[2] = { device, NULL };
    struct llama_model *model;

    params.devices = devices;
    params.n_gpu_layers = device != NULL ? 99 : 0;
    model = llama_model_load_from_file(path, params);
    check(model != NULL, "loading the model");
    return model;
}

int main(int argc, char **argv)
{
    task t = { 0 };

    if (argc < 10 || (t.n_sequences = atoi(argv[5])) < 1 || (t.n_ctx = atoi(argv[6])) < 2 ||
        (t.n_batch = atoi(argv[7])) < 1 || (t.n_threads = atoi(argv[8])) < 1)
        return 2;
    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(argv[1]);
    t.model = load(argv[3], NULL);
    t.n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(t.model));
    t.tokens = read_tokens(llama_model_get_vocab(t.model), argv[4],
                           (size_t)t.n_sequences * (size_t)t.n_ctx);
    t.reference = malloc((size_t)t.n_sequences * (size_t)(t.n_ctx - t.n_ctx / 2) *
                         (size_t)t.n_vocab * sizeof(*t.reference));
    check(t.reference != NULL, "allocating the reference");
    run(&t, 0, t.n_sequences, false);
    llama_model_free(t.model);
    t.model = load(argv[3], ggml_backend_reg_dev_get(ggml_backend_load(argv[2]), 0));
    for (int i = 9; i < argc; i++) {
        setenv("KVANT_PRESET", argv[i], 1);
        run(&t, 0, t.n_sequences, true);
        report(&t, argv[i], "in turn");
        for (int s = 0; s < t.n_sequences; s++)
            run(&t, s, 1, true);
        report(&t, argv[i], "alone");
    }
    return 0;
}
