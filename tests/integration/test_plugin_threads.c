/* test_plugin_threads.c - the threads on which the plug-in computes. It uses the threads of the
 * context's pool, or those that llama.cpp starts for each graph, and starts none. Results are the
 * same bits. */
#define _GNU_SOURCE

#include <dirent.h>
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include <kvant/kvant.h>

#include "ggml-cpu.h"
#include "harness.h"

/* The tokens fill two pages and part of a third, so encoding, sealing and attention have work for
 * two threads. */
#define N_PROMPT 160

static int thread_count(void)
{
    DIR *tasks = opendir("/proc/self/task");
    int n = 0;

    assert_non_null(tasks);
    for (struct dirent *entry = readdir(tasks); entry != NULL; entry = readdir(tasks))
        n += entry->d_name[0] != '.';
    closedir(tasks);
    return n;
}

/* The system lists a joined thread for a moment longer. ThreadSanitizer starts one more thread. */
static void assert_threads(int expected)
{
#if defined(__SANITIZE_THREAD__)
    return;
#endif
    for (int i = 0; i < 1000 && thread_count() != expected; i++)
        nanosleep(&(struct timespec){ .tv_nsec = 2000000 }, NULL);
    assert_int_equal(thread_count(), expected);
}

static bool has_openmp(void)
{
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_get_features_t get_features;
    void *address = harness_cpu_function("ggml_backend_get_features");

    memcpy(&get_features, &address, sizeof(get_features));
    for (const struct ggml_backend_feature *f = get_features(ggml_backend_dev_backend_reg(cpu));
         f->name; f++)
        if (strcmp(f->name, "OPENMP") == 0)
            return true;
    return false;
}

/* Logits after a prompt and one more token, with two threads. */
static float *logits_with(struct ggml_threadpool *pool)
{
    const harness_options options = { .spec = "int-4:axis=channel,group=64", .n_ctx = 256 };
    size_t bytes = (size_t)llama_vocab_n_tokens(harness_vocab()) * sizeof(float);
    struct llama_context *context = harness_context(&options);
    llama_token tokens[N_PROMPT + 1];
    float *logits = malloc(bytes);

    assert_non_null(logits);
    llama_set_n_threads(context, 2, 2);
    if (pool != NULL)
        llama_attach_threadpool(context, pool, pool);
    harness_tokens(tokens, N_PROMPT + 1);
    harness_decode(context, tokens, N_PROMPT, 0, 0, false);
    harness_decode(context, tokens + N_PROMPT, 1, N_PROMPT, 0, false);
    memcpy(logits, llama_get_logits_ith(context, -1), bytes);
    llama_free(context);
    return logits;
}

CASE(the_contexts_threads_are_used)
{
    int before = thread_count(), openmp = has_openmp();
    struct ggml_threadpool *pool = harness_new_pool(2);
    float *lent, *own;

    if (kvant_available_cpus() < 2)
        skip(); /* no thread is lent, and kvant starts none */
    lent = logits_with(pool);
    assert_threads(before + 1); /* the pool's thread, or OpenMP's */
    harness_free_pool(pool);
    assert_threads(before + openmp);

    own = logits_with(NULL);
    assert_threads(before + openmp); /* llama.cpp's own threads end with each graph */
    assert_memory_equal(lent, own, (size_t)llama_vocab_n_tokens(harness_vocab()) * sizeof(float));
    free(lent);
    free(own);
}

typedef struct poll {
    size_t (*kv_memory)(size_t *reserved);
    atomic_bool stop;
    size_t most;
    unsigned long n;
} poll;

static void *ask_for_memory(void *user)
{
    poll *p = user;

    while (!atomic_load(&p->stop)) {
        size_t reserved, bytes = p->kv_memory(&reserved);
        p->most = bytes > p->most ? bytes : p->most;
        p->n++;
        nanosleep(&(struct timespec){ .tv_nsec = 100000 }, NULL);
    }
    return NULL;
}

/* Caches learn, are saved, restored, cleared and freed, while another thread asks for their
 * size. */
static void live(void)
{
    const harness_options options = { .spec = "", .n_ctx = 512, .n_seq = 2 };
    struct llama_context *context = harness_context(&options);
    llama_token tokens[N_PROMPT + 8];
    size_t size;

    harness_tokens(tokens, N_PROMPT + 8);
    for (int again = 0; again < 2; again++) {
        uint8_t *state;
        harness_decode(context, tokens, N_PROMPT, 0, 0, false);
        for (int i = 0; i < 8; i++)
            harness_decode(context, tokens + N_PROMPT + i, 1, N_PROMPT + i, 0, false);
        state = harness_save_state(context, &size);
        assert_int_equal(llama_state_seq_set_data(context, state, size, 1), size);
        llama_memory_seq_cp(llama_get_memory(context), 0, 1, -1, -1);
        llama_memory_clear(llama_get_memory(context), true);
        free(state);
    }
    llama_free(context);
}

CASE(another_thread_asks_for_memory)
{
    void *symbol = ggml_backend_reg_get_proc_address(harness_plugin(), "kvant_kv_memory");
    poll p = { .most = 0 };
    pthread_t thread;

    assert_non_null(symbol);
    memcpy(&p.kv_memory, &symbol, sizeof(symbol));
    assert_int_equal(pthread_create(&thread, NULL, ask_for_memory, &p), 0);
    live();
    live();
    atomic_store(&p.stop, true);
    pthread_join(thread, NULL);
    assert_true(p.n > 0 && p.most > 0);
}

RUN_CASES(harness_start, harness_stop)
