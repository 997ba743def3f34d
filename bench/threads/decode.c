/* decode.c - tokens per second that a model decodes with a number of threads, which may exceed the
 * number of CPUs: kvant run would lower it.
 *
 *   decode LIBRARIES PLUGIN MODEL THREADS SECONDS      PLUGIN "": llama.cpp's own f16 cache
 *
 * Reads a prompt of 64 made-up tokens, then decodes one token at a time for SECONDS. Threads are a
 * pool that polls for work, as llama.cpp's programs make it. Prints tokens, seconds and CPU
 * seconds. On one CPU the last do not depend on what else the machine does. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "llama.h"

enum { N_PROMPT = 64, N_CONTEXT = 2048 };

static void quiet(enum ggml_log_level level, const char *message, void *user)
{
    (void)user;
    if (level == GGML_LOG_LEVEL_ERROR)
        fputs(message, stderr);
}

static double now(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static struct ggml_threadpool *new_pool(int n_threads)
{
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    ggml_backend_reg_t cpu = ggml_backend_dev_backend_reg(device);
    void *address = ggml_backend_reg_get_proc_address(cpu, "ggml_threadpool_new");
    struct ggml_threadpool *(*create)(struct ggml_threadpool_params *);
    struct ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);

    memcpy(&create, &address, sizeof(create));
    return create(&params);
}

static struct llama_context *new_context(const char *libraries, const char *plugin,
                                         const char *path, int n_threads)
{
    ggml_backend_dev_t devices[2] = { NULL, NULL };
    struct llama_model_params model_params = llama_model_default_params();
    struct llama_context_params params = llama_context_default_params();
    struct llama_context *context;

    ggml_backend_load_all_from_path(libraries);
    if (plugin[0] != '\0') {
        devices[0] = ggml_backend_reg_dev_get(ggml_backend_load(plugin), 0);
        model_params.devices = devices;
        model_params.n_gpu_layers = 99;
    }
    params.n_ctx = N_CONTEXT;
    params.n_threads = params.n_threads_batch = n_threads;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    context = llama_init_from_model(llama_model_load_from_file(path, model_params), params);
    llama_attach_threadpool(context, new_pool(n_threads), NULL);
    return context;
}

static void decode(struct llama_context *context, int n, int first)
{
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
    llama_token tokens[N_PROMPT];

    for (int i = 0; i < n; i++)
        tokens[i] = (llama_token)((unsigned)(first + i) * 2654435761u % (unsigned)n_vocab);
    if (llama_decode(context, llama_batch_get_one(tokens, n)) != 0)
        exit(1);
}

int main(int argc, char **argv)
{
    struct llama_context *context;
    double start, seconds, cpu;
    int n = 0;

    if (argc != 6)
        return 2;
    llama_log_set(quiet, NULL);
    context = new_context(argv[1], argv[2], argv[3], atoi(argv[4]));
    decode(context, N_PROMPT, 0);
    decode(context, 1, N_PROMPT);
    start = now(CLOCK_MONOTONIC);
    cpu = now(CLOCK_PROCESS_CPUTIME_ID);
    do
        decode(context, 1, N_PROMPT + 1 + n++);
    while (now(CLOCK_MONOTONIC) - start < atof(argv[5]) && N_PROMPT + 2 + n < N_CONTEXT);
    seconds = now(CLOCK_MONOTONIC) - start;
    cpu = now(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    printf("%d %.3f %.3f\n", n, seconds, cpu);
    fflush(stdout);
    _exit(0); /* threads may wait for a CPU for seconds */
}
