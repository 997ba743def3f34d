/* state_disk.c - how long saving and restoring a long sequence takes through a disk, without the
 * computer's cache of the disk.
 *
 *     state_disk LIBRARIES MODEL CACHE_TYPE TOKENS FILE REPEATS [--wait] [--json]
 *
 * Rows of CHUNK tokens are computed once and restored until the sequence has TOKENS tokens, so a
 * long prompt costs little. Positions repeat, which changes neither sizes nor times. A save counts
 * until the file is on the disk (fsync). Before each restore the system drops its cache of files,
 * which needs root. The disk's own times are those of a file of the same size that is written
 * without the system's cache (O_DIRECT), and read without being used. With --wait the program waits
 * for a line of input before it measures. Run it by `kvant exec --` for kvant's caches. Prints
 * JSON, with --json or without it: medians, and the CPU times of all threads. */
#define _GNU_SOURCE /* O_DIRECT, fsync, clock_gettime */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "ggml-backend.h"
#include "llama.h"

#include "llama_cuda/cache_type.h"
#include "llama_cuda/disk.h"

enum { CHUNK = 4096, BATCH = 512, MOST_REPEATS = 16 };

static struct llama_context *context;
static int vocabulary;

static void check(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "state_disk: %s failed\n", what);
    exit(1);
}

static double seconds(clockid_t clock)
{
    struct timespec t;

    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void quiet(enum ggml_log_level level, const char *message, void *data)
{
    (void)data;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(message, stderr);
}

static void start(const char *libraries, const char *path, const char *type, int tokens)
{
    struct llama_context_params params = llama_context_default_params();
    struct llama_model *model;

    llama_log_set(quiet, NULL);
    ggml_backend_load_all_from_path(libraries);
    model = llama_model_load_from_file(path, llama_model_default_params());
    check(model != NULL, "loading the model");
    params.n_ctx = (uint32_t)(tokens + CHUNK);
    params.n_seq_max = 2;
    params.kv_unified = true;
    params.n_batch = params.n_ubatch = BATCH;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.type_k = params.type_v = type_of(type);
    params.n_threads = params.n_threads_batch = (int)sysconf(_SC_NPROCESSORS_ONLN);
    context = llama_init_from_model(model, params);
    check(context != NULL, "creating the context");
    vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
}

static void decode(int first, int n)
{
    struct llama_batch batch = llama_batch_init(n, 0, 1);

    batch.n_tokens = n;
    for (int i = 0; i < n; i++) {
        batch.token[i] = (llama_token)((unsigned)(first + i) * 2654435761u % (unsigned)vocabulary);
        batch.pos[i] = first + i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 1;
        batch.logits[i] = i == n - 1;
    }
    check(llama_decode(context, batch) == 0, "decoding");
    llama_batch_free(batch);
}

/* Sequence 0 gets `tokens` tokens: the rows of sequence 1, as often as needed. */
static void fill(int tokens)
{
    const llama_memory_t memory = llama_get_memory(context);
    unsigned char *state;
    size_t bytes;

    for (int i = 0; i < CHUNK; i += BATCH)
        decode(i, BATCH);
    bytes = llama_state_seq_get_size(context, 1);
    state = malloc(bytes);
    check(state != NULL && llama_state_seq_get_data(context, state, bytes, 1) == bytes,
          "saving rows");
    for (int n = 0; n < tokens; n += CHUNK) {
        check(llama_state_seq_set_data(context, state, bytes, 1) == bytes, "restoring rows");
        llama_memory_seq_cp(memory, 1, 0, -1, -1);
        llama_memory_seq_rm(memory, 1, -1, -1);
    }
    free(state);
}

/* A time, a CPU time and the disk's own time of each repeat. */
typedef struct times {
    double wall[MOST_REPEATS], cpu[MOST_REPEATS], disk[MOST_REPEATS];
} times;

static void measure(const char *path, bool saves, times *t, int i)
{
    llama_token token = 0;
    size_t n = 0;
    const double wall = seconds(CLOCK_MONOTONIC), cpu = seconds(CLOCK_PROCESS_CPUTIME_ID);

    if (saves) {
        check(llama_state_seq_save_file(context, path, 0, &token, 1) > 0, "saving");
        check(disk_sync(path), "writing the file to the disk");
    } else {
        check(llama_state_seq_load_file(context, path, 0, &token, 1, &n) > 0, "restoring");
    }
    t->wall[i] = seconds(CLOCK_MONOTONIC) - wall;
    t->cpu[i] = seconds(CLOCK_PROCESS_CPUTIME_ID) - cpu;
}

static double disk_seconds(const char *path, off_t bytes, bool writes)
{
    const double start = seconds(CLOCK_MONOTONIC);

    check(disk_alone(path, (size_t)bytes, writes), "measuring the disk");
    return seconds(CLOCK_MONOTONIC) - start;
}

static void measure_disk(const char *of, times *save, times *restore, int i)
{
    char path[4096];
    struct stat file;

    snprintf(path, sizeof(path), "%s.disk", of);
    check(stat(of, &file) == 0, "finding the file");
    save->disk[i] = disk_seconds(path, file.st_size, true);
    check(disk_drop_caches(), "dropping the disk's cache");
    restore->disk[i] = disk_seconds(path, file.st_size, false);
    unlink(path);
}

int main(int argc, char **argv)
{
    const int tokens = argc > 6 ? atoi(argv[4]) : 0, repeats = argc > 6 ? atoi(argv[6]) : 0;
    const char *path = argv[5];
    times save, restore;
    struct stat file;

    check(tokens >= CHUNK && tokens % CHUNK == 0 && repeats > 0 && repeats <= MOST_REPEATS,
          "arguments: LIBRARIES MODEL CACHE_TYPE TOKENS FILE REPEATS [--wait] [--json]");
    start(argv[1], argv[2], argv[3], tokens);
    fill(tokens);
    if (argc > 7 && strcmp(argv[7], "--wait") == 0) {
        fprintf(stderr, "ready\n");
        getchar();
    }
    for (int i = 0; i < repeats; i++) {
        unlink(path);
        measure(path, true, &save, i);
        check(disk_drop_caches(), "dropping the disk's cache");
        llama_memory_seq_rm(llama_get_memory(context), 0, -1, -1);
        measure(path, false, &restore, i);
        measure_disk(path, &save, &restore, i);
    }
    check(stat(path, &file) == 0, "finding the file");
    printf("[{\"tokens\": %d, \"bytes\": %lld, \"save_ms\": %.1f, \"restore_ms\": %.1f, "
           "\"save_cpu_ms\": %.1f, \"restore_cpu_ms\": %.1f, \"disk_write_ms\": %.1f, "
           "\"disk_read_ms\": %.1f}]\n",
           tokens, (long long)file.st_size, 1e3 * median(save.wall, repeats),
           1e3 * median(restore.wall, repeats), 1e3 * median(save.cpu, repeats),
           1e3 * median(restore.cpu, repeats), 1e3 * median(save.disk, repeats),
           1e3 * median(restore.disk, repeats));
    llama_free(context);
    return 0;
}
