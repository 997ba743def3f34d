/* states.c - saved states of a cache on a GPU: their bytes, how long saving and restoring takes,
 * and whether the restored cache answers with the same bits.
 *
 *     states LIBRARIES PLUGIN MODEL save|load TOKENS FILE REPEATS
 *
 * PLUGIN "none": llama.cpp's own device and cache. `save` computes a prompt, saves it in FILE and
 * continues it. `load` restores FILE in an empty context, and compares its answers with those of
 * `save`. Both also save and restore REPEATS times, in files and in memory, and print medians in
 * milliseconds. Files stay in the system's cache, and nothing waits for a disk. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "plugin_model.h"

enum { MOST = 65536, BATCH = 512, NEXT = 16, GREEDY = 48, MOST_REPEATS = 16 };

static llama_token tokens[MOST];
static struct llama_context *context;
static int n_vocab;

static void check(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "states: %s failed\n", what);
    exit(1);
}

static double now(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e3 * (double)t.tv_sec + 1e-6 * (double)t.tv_nsec;
}

static void decode(const llama_token *from, int n, int position, bool all)
{
    struct llama_batch batch = llama_batch_init(n, 0, 1);

    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = from[i];
        batch.pos[i] = position + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = all || i == n - 1;
    }
    check(llama_decode(context, batch) == 0, "decoding");
    llama_batch_free(batch);
}

static size_t best_of(const float *logits)
{
    size_t best = 0;

    for (size_t i = 0; i < (size_t)n_vocab; i++)
        best = logits[i] > logits[best] ? i : best;
    return best;
}

/* Logits of NEXT tokens after the prompt, then greedy tokens with their logits. */
static float *answer(int n)
{
    const size_t row = (size_t)n_vocab;
    float *logits = malloc((NEXT + GREEDY) * row * sizeof(*logits)), *at = logits;

    check(logits != NULL, "allocating");
    decode(tokens + n, NEXT, n, true);
    memcpy(at, llama_get_logits(context), NEXT * row * sizeof(*at));
    for (int i = 0; i < GREEDY; i++) {
        const llama_token best = (llama_token)best_of(at + (i == 0 ? NEXT - 1 : 0) * row);
        decode(&best, 1, n + NEXT + i, true);
        at = logits + (size_t)(NEXT + i) * row;
        memcpy(at, llama_get_logits(context), row * sizeof(*at));
    }
    check(llama_memory_seq_rm(llama_get_memory(context), 0, n, -1), "removing tokens");
    return logits;
}

/* After the first greedy token that differs, the texts are not the same any more. So logits are
 * compared for the given tokens only. */
static void compare(const char *what, const float *a, const float *b)
{
    const size_t row = (size_t)n_vocab, all = (NEXT + GREEDY) * row;
    double most = 0, squares = 0;
    size_t equal = 0;

    for (size_t i = 0; i < NEXT * row; i++) {
        const double d = (double)a[i] - (double)b[i];
        most = d > most ? d : -d > most ? -d : most;
        squares += (double)a[i] * (double)a[i];
    }
    while (equal < NEXT + GREEDY && best_of(a + equal * row) == best_of(b + equal * row))
        equal++;
    printf(
        "%s: %s; largest difference of %d tokens' logits %g, their root mean square %g; the first "
        "%zu of %d tokens are equal\n",
        what, memcmp(a, b, all * sizeof(*a)) == 0 ? "same bits" : "OTHER BITS", NEXT, most,
        sqrt(squares / (double)(NEXT * row)), equal, NEXT + GREEDY);
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double median(double *of, int n)
{
    qsort(of, (size_t)n, sizeof(*of), ascending);
    return of[n / 2];
}

static size_t file_bytes(const char *path)
{
    FILE *file = fopen(path, "rb");
    long n;

    check(file != NULL && fseek(file, 0, SEEK_END) == 0 && (n = ftell(file)) > 0, "reading a file");
    fclose(file);
    return (size_t)n;
}

static void restore_file(const char *path, int n)
{
    llama_token *read = malloc((size_t)n * sizeof(*read));
    size_t n_read = 0;

    check(read != NULL &&
              llama_state_seq_load_file(context, path, 0, read, (size_t)n, &n_read) > 0 &&
              n_read == (size_t)n,
          "restoring");
    free(read);
}

static void empty(void)
{
    check(llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1), "removing tokens");
}

/* The tokens of an answer may have made rows of the sequence leave the exact part, so the state is
 * saved elsewhere. */
static void measure(const char *of, int n, int repeats)
{
    char path[4096];
    double file[2][MOST_REPEATS], memory[3][MOST_REPEATS];
    size_t bytes = 0;

    snprintf(path, sizeof(path), "%s.again", of);
    for (int i = 0; i < repeats; i++) {
        double begin = now();
        unsigned char *state;
        check(llama_state_seq_save_file(context, path, 0, tokens, (size_t)n) > 0, "saving");
        file[0][i] = now() - begin;
        empty();
        begin = now();
        restore_file(path, n);
        llama_synchronize(context);
        file[1][i] = now() - begin;
        begin = now();
        bytes = llama_state_seq_get_size(context, 0);
        memory[0][i] = now() - begin;
        state = malloc(bytes);
        check(state != NULL, "allocating");
        memset(state, 1, bytes); /* as a std::vector does */
        begin = now();
        check(llama_state_seq_get_data(context, state, bytes, 0) == bytes, "saving");
        memory[1][i] = now() - begin;
        empty();
        begin = now();
        check(llama_state_seq_set_data(context, state, bytes, 0) == bytes, "restoring");
        llama_synchronize(context);
        memory[2][i] = now() - begin;
        free(state);
    }
    printf("tokens %d, file %zu bytes, in memory %zu; file: save %.1f ms, restore %.1f ms; memory: "
           "size %.1f ms, save %.1f ms, restore %.1f ms\n",
           n, file_bytes(path), bytes, median(file[0], repeats), median(file[1], repeats),
           median(memory[0], repeats), median(memory[1], repeats), median(memory[2], repeats));
    remove(path);
}

static void exchange_logits(const char *path, float *logits, bool writes)
{
    const size_t n = (NEXT + GREEDY) * (size_t)n_vocab;
    char name[4096];
    FILE *file;

    snprintf(name, sizeof(name), "%s.logits", path);
    file = fopen(name, writes ? "wb" : "rb");
    check(file != NULL && (writes ? fwrite(logits, sizeof(*logits), n, file)
                                  : fread(logits, sizeof(*logits), n, file)) == n,
          "the file of logits");
    fclose(file);
}

int main(int argc, char **argv)
{
    const bool saves = argc == 8 && strcmp(argv[4], "save") == 0;
    const int n = argc == 8 ? atoi(argv[5]) : 0, repeats = argc == 8 ? atoi(argv[7]) : 0;
    struct llama_context_params params = llama_context_default_params();
    struct llama_model *model;
    float *first, *other;
    double begin;

    check(n > 0 && n <= MOST - NEXT && repeats > 0 && repeats <= MOST_REPEATS, "reading arguments");
    model = load_model(argv[1], argv[2], argv[3]);
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < MOST; i++)
        tokens[i] = (llama_token)(((unsigned)i * 2654435761u >> 8) % (unsigned)n_vocab);
    params.n_ctx = (uint32_t)(n + 512);
    params.n_batch = params.n_ubatch = BATCH;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    context = llama_init_from_model(model, params);
    check(context != NULL, "creating the context");
    if (saves) {
        for (int i = 0; i < n; i += BATCH)
            decode(tokens + i, n - i < BATCH ? n - i : BATCH, i, false);
        check(llama_state_seq_save_file(context, argv[6], 0, tokens, (size_t)n) > 0, "saving");
        first = answer(n);
        exchange_logits(argv[6], first, true);
    } else {
        first = malloc((NEXT + GREEDY) * (size_t)n_vocab * sizeof(*first));
        check(first != NULL, "allocating");
        exchange_logits(argv[6], first, false);
        begin = now();
        restore_file(argv[6], n);
        llama_synchronize(context);
        printf("first restore %.1f ms\n", now() - begin);
        other = answer(n);
        compare("another process", first, other);
        free(other);
    }
    empty();
    restore_file(argv[6], n);
    other = answer(n);
    compare("same process", first, other);
    free(other);
    measure(argv[6], n, repeats);
    empty();
    restore_file(argv[6], n);
    other = answer(n);
    compare("after all repeats", first, other);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
