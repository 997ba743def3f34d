/* memory.c - the GPU memory that a context takes, step by step.
 *
 *     memory LIBRARIES PLUGIN MODEL PROMPT ALONE CONTEXT SEQUENCES [TYPE]
 *
 * PLUGIN "none": llama.cpp's own device and cache, of TYPE (f16). Prints the MiB in use after each
 * step that changes them. The steps are the model, the context, batches of 512 tokens up to PROMPT
 * tokens, and ALONE single tokens. With several SEQUENCES (llama-server's slots), slot i gets
 * (i + 1) / SEQUENCES of the prompt, and then all slots decode together. Afterwards every second
 * slot is emptied and gets another number of tokens. "8u" is 8 slots of one unified cache. The last
 * line is the most memory that was seen: a thread looks every millisecond.
 * Nothing else may use the GPU meanwhile. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include <dlfcn.h>

#include "cache_type.h"
#include "plugin_model.h"

enum { MOST = 131072, KINDS = 30000, BATCH = 512, MOST_SEQUENCES = 64 };

static llama_token tokens[MOST];
static int (*memory_info)(size_t *unused, size_t *total);
static int (*set_context)(void *context);
static void *context_of_gpu;
static size_t before; /* free bytes before anything was loaded */
static atomic_size_t most;
static atomic_bool ends;
static double last = -1;

static size_t in_use(void)
{
    size_t unused = 0, total = 0, used;

    set_context(context_of_gpu);
    if (memory_info(&unused, &total) != 0)
        exit(1);
    used = before > unused ? before - unused : 0;
    if (used > atomic_load(&most))
        atomic_store(&most, used);
    return used;
}

static void *look(void *data)
{
    const struct timespec pause = { 0, 1000000 };

    while (!atomic_load(&ends)) {
        in_use();
        nanosleep(&pause, NULL);
    }
    return data;
}

static void say(const char *what, int number)
{
    const double mib = (double)in_use() / 1048576;

    if (mib != last) {
        printf("%9.2f MiB %+9.2f  %s %d\n", mib, mib - (last < 0 ? 0 : last), what, number);
        fprintf(stderr, "memory: %.2f MiB after %s %d\n", mib, what, number);
    }
    fflush(stdout);
    last = mib;
}

/* llama.cpp's lines about the sizes of its buffers. */
static void print_sizes(enum ggml_log_level level, const char *message, void *data)
{
    (void)level;
    (void)data;
    if (strstr(message, "buffer size") != NULL)
        fprintf(stderr, "llama.cpp: %s", message);
}

/* The driver's functions, and the GPU's context that all of CUDA shares. */
static void open_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int (*start)(unsigned), (*retain)(void **, int);
    size_t total;

    if (driver == NULL)
        exit(1);
    *(void **)&start = dlsym(driver, "cuInit");
    *(void **)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&set_context = dlsym(driver, "cuCtxSetCurrent");
    *(void **)&memory_info = dlsym(driver, "cuMemGetInfo_v2");
    if (start(0) != 0 || retain(&context_of_gpu, 0) != 0 || set_context(context_of_gpu) != 0 ||
        memory_info(&before, &total) != 0)
        exit(1);
}

/* Decodes n tokens for each of the sequences from `first` to `end`, which have positions[i]
 * tokens. */
static void decode(struct llama_context *context, int first, int end, int *positions, int n)
{
    struct llama_batch batch = llama_batch_init(n * (end - first), 0, 1);

    for (int s = first; s < end; s++)
        for (int i = 0; i < n; i++, batch.n_tokens++) {
            const int at = batch.n_tokens;
            batch.token[at] = tokens[positions[s]];
            batch.pos[at] = positions[s]++;
            batch.n_seq_id[at] = 1;
            batch.seq_id[at][0] = s;
            batch.logits[at] = i == n - 1;
        }
    if (llama_decode(context, batch) != 0)
        exit(1);
    llama_synchronize(context);
    llama_batch_free(batch);
}

static struct llama_context *new_context(struct llama_model *model, int n_ctx, int n_sequences,
                                         bool unified, const char *type)
{
    struct llama_context_params params = llama_context_default_params();
    struct llama_context *context;

    params.n_ctx = (uint32_t)n_ctx;
    params.n_batch = params.n_ubatch = BATCH;
    params.n_seq_max = (uint32_t)n_sequences;
    params.kv_unified = unified;
    params.type_k = params.type_v = type_of(type);
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    context = llama_init_from_model(model, params);
    if (context == NULL)
        exit(1);
    return context;
}

/* Fills a slot with n tokens, batch by batch. */
static void fill_slot(struct llama_context *context, int slot, int *positions, int n)
{
    for (int left = n; left > 0; left -= BATCH) {
        decode(context, slot, slot + 1, positions, left < BATCH ? left : BATCH);
        say("token of the prompt", positions[slot]);
    }
    printf("slot %d has %d tokens\n", slot, n);
}

static void fill(struct llama_context *context, int prompt, int alone, int n_sequences)
{
    int positions[MOST_SEQUENCES] = { 0 };

    for (int s = 0; s < n_sequences; s++)
        fill_slot(context, s, positions, (int)((long)prompt * (s + 1) / n_sequences));
    for (int i = 0; i < alone; i++) {
        decode(context, 0, n_sequences, positions, 1);
        say("single token", i);
    }
    for (int s = 1; s < n_sequences; s += 2) {
        llama_memory_seq_rm(llama_get_memory(context), s, -1, -1);
        positions[s] = 0;
        fill_slot(context, s, positions, (int)((long)prompt * (n_sequences - s) / n_sequences));
        decode(context, 0, n_sequences, positions, 1);
        say("single token after slot", s);
    }
}

int main(int argc, char **argv)
{
    struct llama_model *model;
    struct llama_context *context;
    pthread_t thread;
    int x[4];

    if (argc != 8 && argc != 9)
        return 2;
    for (int i = 0; i < 4; i++)
        x[i] = atoi(argv[4 + i]);
    if (x[0] < 1 || x[1] < 0 || x[3] < 1 || x[3] > MOST_SEQUENCES || x[0] + x[1] > MOST)
        return 2;
    for (int i = 0; i < MOST; i++)
        tokens[i] = (llama_token)(((unsigned)i * 2654435761u >> 8) % KINDS);
    open_driver();
    say("CUDA's context", 0);
    pthread_create(&thread, NULL, look, NULL);
    model = load_model(argv[1], argv[2], argv[3]);
    say("the model", 0);
    llama_log_set(print_sizes, NULL);
    context =
        new_context(model, x[2], x[3], strchr(argv[7], 'u') != NULL, argc == 9 ? argv[8] : "f16");
    say("the context", 0);
    fill(context, x[0], x[1], x[3]);
    llama_free(context);
    say("the context's end", 0);
    llama_model_free(model);
    say("the model's end", 0);
    atomic_store(&ends, true);
    pthread_join(thread, NULL);
    printf("%9.2f MiB at most\n", (double)atomic_load(&most) / 1048576);
    return 0;
}
