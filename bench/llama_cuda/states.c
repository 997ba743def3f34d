/* states.c - saved states of a cache on a GPU: their bytes, how long saving and restoring takes,
 * and whether the restored cache answers with the same bits.
 *
 *     states LIBRARIES PLUGIN MODEL save|load|speed|next TOKENS FILE REPEATS
 *
 * PLUGIN "none": llama.cpp's own device and cache. `save` computes a prompt, saves it in FILE and
 * continues it. `load` restores FILE in an empty context, and compares its answers with those of
 * `save`. Both also save and restore REPEATS times, in files and in memory, and print medians in
 * milliseconds. Files stay in the system's cache, and nothing waits for a disk.
 *
 * `speed` computes a prompt, and then saves and restores it through FILE once, and REPEATS times
 * more of which it prints each time and the medians, as JSON. A save counts until the file is on
 * the disk. Before each restore the system drops its cache of files, which needs root, and the
 * sequence is empty. The disk's own times are those of a file of the same size.
 *
 * `next` computes a prompt next to another sequence of a unified cache, and saves it in FILE. It
 * restores FILE next to REPEATS tokens of that sequence, and compares the answers, and the bytes of
 * the state when it is saved again. "filled": the neighbour then decodes tokens until its last
 * block is full, so the next cells are those that they were for the saved prompt. "gap": it does
 * not, and llama.cpp puts next tokens into the neighbour's last block. "alone": there is no
 * neighbour. */
#define _GNU_SOURCE /* O_DIRECT, fsync, clock_gettime */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "disk.h"
#include "plugin_model.h"

enum { MOST = 65536, BATCH = 512, NEXT = 16, GREEDY = 48, MOST_REPEATS = 16, CELLS = 64 };

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

static void decode_in(const llama_token *from, int n, int position, bool all, int sequence)
{
    struct llama_batch batch = llama_batch_init(n, 0, 1);

    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = from[i];
        batch.pos[i] = position + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = all || i == n - 1;
    }
    check(llama_decode(context, batch) == 0, "decoding");
    llama_batch_free(batch);
}

static void decode(const llama_token *from, int n, int position, bool all)
{
    decode_in(from, n, position, all, 0);
}

static size_t best_of(const float *logits)
{
    size_t best = 0;

    for (size_t i = 0; i < (size_t)n_vocab; i++)
        best = logits[i] > logits[best] ? i : best;
    return best;
}

/* Logits of NEXT tokens after the prompt, the first token alone, then greedy tokens with their
 * logits. */
static float *answer(int n)
{
    const size_t row = (size_t)n_vocab;
    float *logits = malloc((NEXT + GREEDY) * row * sizeof(*logits)), *at = logits;

    check(logits != NULL, "allocating");
    decode(tokens + n, 1, n, true);
    memcpy(at, llama_get_logits(context), row * sizeof(*at));
    decode(tokens + n + 1, NEXT - 1, n + 1, true);
    memcpy(at + row, llama_get_logits(context), (NEXT - 1) * row * sizeof(*at));
    for (int i = 0; i < GREEDY; i++) {
        const llama_token best = (llama_token)best_of(at + (i == 0 ? NEXT - 1 : 0) * row);
        decode(&best, 1, n + NEXT + i, true);
        at = logits + (size_t)(NEXT + i) * row;
        memcpy(at, llama_get_logits(context), row * sizeof(*at));
    }
    check(llama_memory_seq_rm(llama_get_memory(context), 0, n, -1), "removing tokens");
    return logits;
}

static double largest_difference(const float *a, const float *b, size_t n)
{
    double most = 0;

    for (size_t i = 0; i < n; i++)
        most = fmax(most, fabs((double)a[i] - (double)b[i]));
    return most;
}

/* After the first greedy token that differs, the texts are not the same any more. So logits are
 * compared for the given tokens only. */
static void compare(const char *what, const float *a, const float *b)
{
    const size_t row = (size_t)n_vocab, all = (NEXT + GREEDY) * row;
    double squares = 0;
    size_t equal = 0;

    for (size_t i = 0; i < NEXT * row; i++)
        squares += (double)a[i] * (double)a[i];
    while (equal < NEXT + GREEDY && best_of(a + equal * row) == best_of(b + equal * row))
        equal++;
    printf(
        "%s: %s; largest difference of the first token's logits %g, of %d tokens' %g, their root "
        "mean square %g; the first %zu of %d tokens are equal\n",
        what, memcmp(a, b, all * sizeof(*a)) == 0 ? "same bits" : "OTHER BITS",
        largest_difference(a, b, row), NEXT, largest_difference(a, b, NEXT * row),
        sqrt(squares / (double)(NEXT * row)), equal, NEXT + GREEDY);
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

/* Through a disk */

static double disk_ms(const char *path, size_t n, bool writes)
{
    const double begin = now();

    check(disk_alone(path, n, writes), "measuring the disk");
    return now() - begin;
}

static void print_times(const char *name, double *times, int n)
{
    printf("\"%s_all\": [", name);
    for (int i = 0; i < n; i++)
        printf("%s%.1f", i > 0 ? ", " : "", times[i]);
    printf("], \"%s_ms\": %.1f, ", name, median(times, n));
}

static void measure_disk(const char *path, int n, int repeats)
{
    double save[MOST_REPEATS], restore[MOST_REPEATS], writes[MOST_REPEATS], reads[MOST_REPEATS];
    char other[4096];
    size_t bytes = 0;
    bool drops_caches = true; /* false: the system forbids it, and files are read from memory */

    snprintf(other, sizeof(other), "%s.disk", path);
    for (int i = -1; i < repeats; i++) { /* the first time the system gets memory for the file */
        const int to = i < 0 ? 0 : i;
        double begin;
        unlink(path);
        begin = now();
        check(llama_state_seq_save_file(context, path, 0, tokens, (size_t)n) > 0, "saving");
        check(disk_sync(path), "writing a file to the disk");
        save[to] = now() - begin;
        bytes = file_bytes(path);
        drops_caches = disk_drop_caches();
        empty();
        begin = now();
        restore_file(path, n);
        llama_synchronize(context);
        restore[to] = now() - begin;
        writes[to] = disk_ms(other, bytes, true);
        drops_caches = disk_drop_caches() && drops_caches;
        reads[to] = disk_ms(other, bytes, false);
        unlink(other);
    }
    printf("{\"tokens\": %d, \"bytes\": %zu, ", n, bytes);
    print_times("save", save, repeats);
    print_times("restore", restore, repeats);
    print_times("disk_write", writes, repeats);
    print_times("disk_read", reads, repeats);
    printf("\"drops_caches\": %s, \"path\": \"%s\"}\n", drops_caches ? "true" : "false", path);
    unlink(path);
}

/* Next to another sequence */

static unsigned char *state_of(size_t *bytes)
{
    unsigned char *state;

    *bytes = llama_state_seq_get_size(context, 0);
    state = malloc(*bytes);
    check(state != NULL && llama_state_seq_get_data(context, state, *bytes, 0) == *bytes, "saving");
    return state;
}

/* Decodes the first n tokens of a sequence from `begin` on. */
static void prompt(const llama_token *of, int begin, int n, int sequence)
{
    for (int i = begin; i < n; i += BATCH)
        decode_in(of + i, n - i < BATCH ? n - i : BATCH, i, false, sequence);
}

static void begin_context(struct llama_model *model, const struct llama_context_params *params)
{
    if (context != NULL)
        llama_free(context);
    context = llama_init_from_model(model, *params);
    check(context != NULL, "creating the context");
}

static void compare_next_to(struct llama_model *model, const struct llama_context_params *params,
                            const char *path, int n, int n_others)
{
    static const char *const ways[] = { "filled", "gap", "alone" };
    const llama_token *others = tokens + 1000;
    const int full = (n_others + CELLS - 1) / CELLS * CELLS;
    size_t n_saved, n_again;
    unsigned char *saved, *again;
    float *original, *other;

    prompt(others, 0, full, 1);
    prompt(tokens, 0, n, 0);
    check(llama_state_seq_save_file(context, path, 0, tokens, (size_t)n) > 0, "saving");
    saved = state_of(&n_saved);
    original = answer(n);
    for (int way = 0; way < 3; way++) {
        size_t equal = 0;
        begin_context(model, params);
        if (way < 2)
            prompt(others, 0, n_others, 1);
        restore_file(path, n);
        again = state_of(&n_again);
        for (size_t i = 0; i < n_saved && i < n_again; i++)
            equal += saved[i] == again[i];
        if (way == 0)
            prompt(others, n_others, full, 1);
        other = answer(n);
        printf("%s, next to %d: %zu bytes, saved again %zu, of which %.2f %% are equal\n",
               ways[way], way < 2 ? n_others : 0, n_saved, n_again,
               100 * (double)equal / (double)n_saved);
        compare(ways[way], original, other);
        free(again);
        free(other);
    }
    free(saved);
    free(original);
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

/* Compares the answers of a restored cache with the answers of the saved one. */
static void compare_restored(const char *path, int n, int repeats, bool saves)
{
    float *first, *other;
    double begin;

    if (saves) {
        check(llama_state_seq_save_file(context, path, 0, tokens, (size_t)n) > 0, "saving");
        first = answer(n);
        exchange_logits(path, first, true);
    } else {
        first = malloc((NEXT + GREEDY) * (size_t)n_vocab * sizeof(*first));
        check(first != NULL, "allocating");
        exchange_logits(path, first, false);
        begin = now();
        restore_file(path, n);
        llama_synchronize(context);
        printf("first restore %.1f ms\n", now() - begin);
        other = answer(n);
        compare("another process", first, other);
        free(other);
    }
    empty();
    restore_file(path, n);
    other = answer(n);
    compare("same process", first, other);
    free(other);
    measure(path, n, repeats);
    empty();
    restore_file(path, n);
    other = answer(n);
    compare("after all repeats", first, other);
    free(other);
    free(first);
}

int main(int argc, char **argv)
{
    const char *what = argc == 8 ? argv[4] : "", *path = argv[6];
    const bool saves = strcmp(what, "save") == 0, speed = strcmp(what, "speed") == 0,
               next = strcmp(what, "next") == 0;
    const int n = argc == 8 ? atoi(argv[5]) : 0, repeats = argc == 8 ? atoi(argv[7]) : 0;
    struct llama_context_params params = llama_context_default_params();
    struct llama_model *model;

    check(n > 0 && n <= MOST - NEXT && repeats > 0 && (repeats <= MOST_REPEATS || next),
          "reading arguments");
    model = load_model(argv[1], argv[2], argv[3]);
    n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int i = 0; i < MOST; i++)
        tokens[i] = (llama_token)(((unsigned)i * 2654435761u >> 8) % (unsigned)n_vocab);
    params.n_ctx = (uint32_t)(n + (next ? repeats + 1024 : 512));
    params.n_seq_max = next ? 2 : 1;
    params.kv_unified = next;
    params.n_batch = params.n_ubatch = BATCH;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    begin_context(model, &params);
    if (saves || speed)
        prompt(tokens, 0, n, 0);
    if (speed)
        for (char *one = strtok(argv[6], ","); one != NULL; one = strtok(NULL, ","))
            measure_disk(one, n, repeats);
    else if (next)
        compare_next_to(model, &params, path, n, repeats);
    else
        compare_restored(path, n, repeats, saves);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
