#define _POSIX_C_SOURCE 200809L
/* bench_cache.c - the time of the cache in an engine on an NVIDIA GPU: append, seal, and a
 * kvant_cache of 32 layers.
 *
 *     bench_cuda_cache [--csv FILE] [--commit ID] [--compiler NAME] [append] [cache]
 *
 * append: calls of kvant/cuda.h. Each is the replay of a graph after memory of four times the
 * second-level cache was overwritten, as in bench_append.py. K and V of 8 kv heads x 128 in bf16.
 *
 * cache: every preset, with and without a calibration, 1 and 8 sequences. Batches of 512 tokens
 * come first, then single tokens, with params.asynchronous; "checked" is without it. Times are per
 * layer: until append (attention) of all layers is done, and the time of the calls themselves on
 * the host. `copy` is cudaMemcpyAsync of the same rows as fp16. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda_runtime_api.h>

#include <kvant/cache.h>
#include <kvant/calibration.h>
#include <kvant/cuda.h>

enum {
    LAYERS = 32,
    HEADS = 32,
    KV_HEADS = 8,
    DIM = 128,
    WIDTH = KV_HEADS * DIM,
    PREFILL = 512,
    PREFILLS = 4,
    STEPS = 130
};
enum {
    MOST_SEQUENCES = 8,
    MOST_TOKENS = PREFILL * PREFILLS + STEPS + 64,
    REPEATS = 41,
    BLOCKS = 256
};

#define CALIBRATION "bench_cache.kvcal"

static struct {
    FILE *csv;
    const char *commit, *compiler, *machine, *command;
    cudaStream_t stream;
    cudaEvent_t begin, end;
} bench = { .commit = "unknown", .compiler = "unknown" };

static void die(const char *what, const char *why)
{
    fprintf(stderr, "bench_cache: %s: %s\n", what, why);
    exit(1);
}

static void cuda(cudaError_t error)
{
    if (error != cudaSuccess)
        die("CUDA", cudaGetErrorString(error));
}

static void kvant(kvant_status status)
{
    if (status != KVANT_OK)
        die(kvant_strerror(status), kvant_error_message());
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static double elapsed(void)
{
    float ms;
    cuda(cudaEventSynchronize(bench.end));
    cuda(cudaEventElapsedTime(&ms, bench.begin, bench.end));
    return ms * 1e3;
}

static void *device(size_t bytes)
{
    void *memory;
    cuda(cudaMalloc(&memory, bytes));
    cuda(cudaMemset(memory, 0, bytes));
    return memory;
}

static float number(void)
{
    static uint64_t state = 88172645463325252u;
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        sum += (float)(state >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7320508f;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *times, int n)
{
    qsort(times, (size_t)n, sizeof *times, by_size);
    return times[n / 2];
}

static double mean(const double *times, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += times[i];
    return sum / n;
}

static void row(const char *name, const char *codec, int batch, int tokens, const char *what,
                double us, double host)
{
    printf("%-22s %-28s batch %d, %4d tokens: %-10s %8.2f us", name, codec, batch, tokens, what,
           us);
    if (host > 0)
        printf(", host %.2f us", host);
    printf("\n");
    fflush(stdout);
    if (bench.csv)
        fprintf(bench.csv, "%s,%s,%s,%s,%s,%s,%d,%d,%d,%d,%s,%.2f,%.2f\n", bench.machine,
                bench.compiler, bench.commit, bench.command, name, codec, batch, tokens, KV_HEADS,
                DIM, what, us, host);
}

/* ---- calls of cuda.h ---- */

typedef struct pools {
    kvant_cuda_codec *codec[2], *open[2];
    kvant_cuda_pages sealed[2], opened[2];
    uint16_t *rows[2];
    int64_t *slots;
    int32_t *blocks;
} pools;

static void pools_new(pools *p, const char *spec)
{
    static const char *names[] = { "k", "v" };
    int64_t slots[BLOCKS];
    int32_t blocks[BLOCKS];
    uint16_t *rows = malloc((size_t)BLOCKS * WIDTH * sizeof *rows);
    for (int role = 0; role < 2; role++) {
        kvant_codec_info info = { .size = sizeof info };
        if (kvant_cuda_codec_create(spec, DIM, (kvant_role)role, 1, &p->codec[role], NULL, 0) !=
            KVANT_OK)
            die(names[role], kvant_error_message());
        kvant(kvant_cuda_codec_create_open(p->codec[role], &p->open[role]));
        kvant(kvant_cuda_codec_get_info(p->codec[role], &info));
        const size_t open_bytes = 64 * DIM * sizeof(uint16_t);
        p->sealed[role] = (kvant_cuda_pages){ device(BLOCKS * KV_HEADS * info.page_bytes),
                                              KV_HEADS * info.page_bytes, info.page_bytes };
        p->opened[role] = (kvant_cuda_pages){ device(BLOCKS * KV_HEADS * open_bytes),
                                              KV_HEADS * open_bytes, open_bytes };
        for (size_t i = 0; i < (size_t)BLOCKS * WIDTH; i++) {
            const float x = number();
            uint32_t bits;
            memcpy(&bits, &x, sizeof bits);
            rows[i] = (uint16_t)(bits >> 16);
        }
        p->rows[role] = device((size_t)BLOCKS * WIDTH * sizeof *rows);
        cuda(cudaMemcpy(p->rows[role], rows, (size_t)BLOCKS * WIDTH * sizeof *rows,
                        cudaMemcpyHostToDevice));
    }
    for (int i = 0; i < BLOCKS; i++) { /* of a decode step's sequences, each in another block */
        slots[i] = i * 64 + 17;
        blocks[i] = (i * 37 + 11) % BLOCKS;
    }
    p->slots = device(sizeof slots), p->blocks = device(sizeof blocks);
    cuda(cudaMemcpy(p->slots, slots, sizeof slots, cudaMemcpyHostToDevice));
    cuda(cudaMemcpy(p->blocks, blocks, sizeof blocks, cudaMemcpyHostToDevice));
    free(rows);
}

/* fp16 pages full of numbers, because a trellis search over zeros would be quicker. */
static void fill_open(const pools *p)
{
    const size_t n = (size_t)BLOCKS * 64 * WIDTH;
    uint16_t *numbers = malloc(n * sizeof *numbers);
    for (int role = 0; role < 2; role++) {
        for (size_t i = 0; i < n; i++) { /* of magnitude 2^-14 to 65504 */
            const float x = number();
            uint32_t bits;
            memcpy(&bits, &x, sizeof bits);
            const uint32_t exponent = bits >> 23 & 0xff;
            numbers[i] =
                (uint16_t)(exponent < 113 ? 0
                                          : (bits >> 16 & 0x8000) | (exponent - 112) << 10 |
                                                (bits >> 13 & 0x3ff));
        }
        cuda(
            cudaMemcpy(p->opened[role].base, numbers, n * sizeof *numbers, cudaMemcpyHostToDevice));
    }
    free(numbers);
}

static void pools_free(pools *p)
{
    for (int role = 0; role < 2; role++) {
        kvant_cuda_codec_free(&p->codec[role]);
        kvant_cuda_codec_free(&p->open[role]);
        cuda(cudaFree(p->sealed[role].base));
        cuda(cudaFree(p->opened[role].base));
        cuda(cudaFree(p->rows[role]));
    }
    cuda(cudaFree(p->slots));
    cuda(cudaFree(p->blocks));
}

typedef enum operation { APPEND, APPEND_OPEN, SEAL, COPY } operation;

static void enqueue(const pools *p, operation what, int n)
{
    kvant_cuda_append_args append = { .size = sizeof append,
                                      .type = KVANT_CUDA_BF16,
                                      .n_tokens = (uint32_t)n,
                                      .n_kv_heads = KV_HEADS,
                                      .slots = p->slots };
    kvant_cuda_seal_args seal = { .size = sizeof seal,
                                  .n_blocks = (uint32_t)n,
                                  .n_kv_heads = KV_HEADS,
                                  .from = p->blocks,
                                  .to = p->blocks };
    for (int role = 0; role < 2; role++) {
        const bool open = what == APPEND_OPEN;
        *(role ? &append.v : &append.k) =
            (kvant_cuda_rows){ .codec = open ? p->open[role] : p->codec[role],
                               .pages = open ? p->opened[role] : p->sealed[role],
                               .rows = p->rows[role],
                               .token_stride = WIDTH,
                               .head_stride = DIM };
        *(role ? &seal.v : &seal.k) =
            (kvant_cuda_seal_pages){ p->codec[role], p->opened[role], p->sealed[role] };
        if (what == COPY)
            cuda(cudaMemcpyAsync(p->opened[role].base, p->rows[role], (size_t)n * WIDTH * 2,
                                 cudaMemcpyDeviceToDevice, bench.stream));
    }
    if (what == SEAL)
        kvant(kvant_cuda_seal(&seal, bench.stream));
    else if (what != COPY)
        kvant(kvant_cuda_append(&append, bench.stream));
}

/* Microseconds of a replay; cold: after the second-level cache was overwritten. */
static double replay(const pools *p, operation what, int n, void *flush, size_t flush_bytes)
{
    cudaGraph_t graph;
    cudaGraphExec_t run;
    double times[REPEATS];
    cuda(cudaStreamBeginCapture(bench.stream, cudaStreamCaptureModeThreadLocal));
    enqueue(p, what, n);
    cuda(cudaStreamEndCapture(bench.stream, &graph));
    cuda(cudaGraphInstantiate(&run, graph, 0));
    for (int i = -3; i < REPEATS; i++) {
        cuda(cudaMemsetAsync(flush, i, flush_bytes, bench.stream));
        cuda(cudaEventRecord(bench.begin, bench.stream));
        cuda(cudaGraphLaunch(run, bench.stream));
        cuda(cudaEventRecord(bench.end, bench.stream));
        const double us = elapsed();
        if (i >= 0)
            times[i] = us;
    }
    cuda(cudaGraphExecDestroy(run));
    cuda(cudaGraphDestroy(graph));
    return median(times, REPEATS);
}

static void bench_append(void)
{
    static const char *const specs[] = { "int-4",        "int-8",        "turboquant-4",
                                         "turboquant-3", "turboquant-6", "trellis-4" };
    static const struct {
        operation what;
        const char *name;
        int n[4];
    } jobs[] = { { APPEND, "append", { 1, 8, 64, 0 } },
                 { APPEND_OPEN, "append to open pages", { 1, 8, 64, 0 } },
                 { SEAL, "seal", { 1, 8, 0, 0 } },
                 { COPY, "copy", { 1, 8, 64, 0 } } };
    const size_t flush_bytes = (size_t)256 << 20;
    void *flush = device(flush_bytes);
    for (size_t s = 0; s < sizeof specs / sizeof *specs; s++) {
        pools p;
        pools_new(&p, specs[s]);
        fill_open(&p);
        for (size_t j = 0; j < sizeof jobs / sizeof *jobs; j++)
            for (int i = 0; jobs[j].n[i]; i++) {
                if ((jobs[j].what == COPY && s) ||
                    (jobs[j].what == APPEND_OPEN && s != 0 && s != 2))
                    continue;
                const int n = jobs[j].n[i], tokens = jobs[j].what == SEAL ? 64 * n : n;
                row(jobs[j].name, specs[s], 1, tokens, "cold",
                    replay(&p, jobs[j].what, n, flush, flush_bytes), 0);
                row(jobs[j].name, specs[s], 1, tokens, "warm",
                    replay(&p, jobs[j].what, n, flush, 1), 0);
            }
        pools_free(&p);
    }
    cuda(cudaFree(flush));
}

/* ---- caches ---- */

/* Rows and queries whose channels differ in size and lean on each other. */
static void make_rows(float *rows, size_t n)
{
    for (size_t i = 0; i < n; i++)
        rows[i] = number() * (float)(1 + i % DIM % 5) * 0.3f +
                  (i % DIM == 3 ? 4.0f : 0.25f * (float)(i % DIM % 7));
}

static void save_calibration(void)
{
    kvant_calibrator_config config = { .size = sizeof config, .model = "bench" };
    kvant_calibrator *calibrator;
    kvant_calibration *calibration;
    static float rows[64 * WIDTH];
    kvant(kvant_calibrator_create(&config, &calibrator, NULL, 0));
    make_rows(rows, 64 * WIDTH);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        for (int role = 0; role < 2; role++)
            for (int pass = 0; pass < 4; pass++)
                kvant(kvant_calibrator_add_rows(calibrator, layer, (kvant_role)role, KV_HEADS, DIM,
                                                rows + layer, WIDTH, 63));
        for (uint32_t head = 0; head < KV_HEADS; head++)
            kvant(kvant_calibrator_add_queries(calibrator, layer, head, DIM, rows + head * DIM,
                                               WIDTH, 64));
    }
    for (uint32_t left = 1; left;)
        kvant(kvant_calibrator_cluster(calibrator, &left));
    kvant(kvant_calibrator_finish(calibrator, &calibration));
    kvant(kvant_calibration_save(calibration, CALIBRATION, NULL, 0));
    kvant_calibration_free(&calibration);
    kvant_calibrator_free(&calibrator);
}

typedef struct setting {
    kvant_cache *cache;
    int batch;
    int32_t sequences[MOST_SEQUENCES];
    float *k, *v, *q, *out; /* device, for PREFILL tokens */
    const char *name;
} setting;

/* All layers, n tokens of every sequence; *host: until the calls had returned. Per layer. */
static double step(const setting *s, bool attend, uint32_t n, double *host)
{
    cuda(cudaStreamSynchronize(bench.stream));
    const double start = now();
    cuda(cudaEventRecord(bench.begin, bench.stream));
    for (uint32_t layer = 0; layer < LAYERS; layer++)
        if (attend)
            kvant(kvant_cache_attend_batch(s->cache, layer, s->sequences, (uint32_t)s->batch, s->q,
                                           s->out, n));
        else
            kvant(kvant_cache_append_batch(s->cache, layer, s->sequences, (uint32_t)s->batch, s->k,
                                           s->v, n));
    cuda(cudaEventRecord(bench.end, bench.stream));
    *host = (now() - start) / LAYERS;
    return elapsed() / LAYERS;
}

/* The same rows as fp16, for all layers. */
static double copy_rows(const setting *s, uint32_t n, uint16_t *room)
{
    const size_t bytes = (size_t)n * WIDTH * sizeof(uint16_t);
    double times[9];
    for (int t = 0; t < 9; t++) {
        cuda(cudaEventRecord(bench.begin, bench.stream));
        for (int layer = 0; layer < LAYERS; layer++)
            for (int i = 0; i < 2 * s->batch; i++)
                cuda(cudaMemcpyAsync(room + (size_t)(layer * 2 * s->batch + i) % 64 * bytes / 2,
                                     s->k, bytes, cudaMemcpyDeviceToDevice, bench.stream));
        cuda(cudaEventRecord(bench.end, bench.stream));
        times[t] = elapsed() / LAYERS;
    }
    return median(times, 9);
}

static void run_steps(const setting *s, const char *name, uint32_t n, int steps, uint16_t *room)
{
    static double us[2][STEPS], host[2][STEPS];
    static const char *const names[] = { "append", "attention" };
    for (int i = 0; i < steps; i++)
        for (int attend = 0; attend < 2; attend++)
            us[attend][i] = step(s, attend, n, &host[attend][i]);
    for (int attend = 0; attend < 2; attend++) {
        char what[32];
        snprintf(what, sizeof what, "%s mean", names[attend]);
        row(name, s->name, s->batch, (int)n, what, mean(us[attend], steps),
            mean(host[attend], steps));
        snprintf(what, sizeof what, "%s median", names[attend]);
        row(name, s->name, s->batch, (int)n, what, median(us[attend], steps),
            median(host[attend], steps));
    }
    row(name, s->name, s->batch, (int)n, "copy", copy_rows(s, n, room), 0);
}

static void bench_preset(const char *preset, bool calibrated, int batch, bool asynchronous)
{
    char name[64];
    const size_t n = (size_t)PREFILL * MOST_SEQUENCES;
    kvant_cache_params params = KVANT_CACHE_PARAMS;
    params.n_layers = LAYERS, params.n_heads = HEADS, params.n_kv_heads = KV_HEADS,
    params.head_dim = DIM;
    params.max_tokens = (uint32_t)batch * MOST_TOKENS, params.max_sequences = (uint32_t)batch;
    params.device = "cuda", params.stream = bench.stream, params.asynchronous = asynchronous;
    if (strchr(preset, '-'))
        params.k = params.v = preset;
    else
        params.preset = preset;
    params.calibration = calibrated ? CALIBRATION : NULL;
    setting s = { .batch = batch, .name = name };
    snprintf(name, sizeof name, "%s%s%s", preset, calibrated ? " calibrated" : "",
             asynchronous ? "" : " checked");
    kvant(kvant_cache_create(&params, &s.cache));
    for (int i = 0; i < batch; i++)
        s.sequences[i] = kvant_sequence_create(s.cache);
    float *rows = malloc(n * WIDTH * sizeof *rows);
    make_rows(rows, n * WIDTH);
    s.k = device(n * WIDTH * sizeof *rows), s.v = device(n * WIDTH * sizeof *rows);
    s.q = device(n * HEADS * DIM * sizeof *rows), s.out = device(n * HEADS * DIM * sizeof *rows);
    uint16_t *room = device((size_t)64 * PREFILL * WIDTH * sizeof *room);
    cuda(cudaMemcpy(s.k, rows, n * WIDTH * sizeof *rows, cudaMemcpyHostToDevice));
    cuda(cudaMemcpy(s.v, rows, n * WIDTH * sizeof *rows, cudaMemcpyHostToDevice));
    for (size_t i = 0; i < HEADS / KV_HEADS; i++)
        cuda(cudaMemcpy(s.q + i * n * WIDTH, rows, n * WIDTH * sizeof *rows,
                        cudaMemcpyHostToDevice));
    run_steps(&s, "prefill", PREFILL, PREFILLS, room);
    run_steps(&s, "decode", 1, STEPS, room);
    kvant_cache_free(&s.cache); /* waits */
    void *memory[] = { s.k, s.v, s.q, s.out, room };
    for (int i = 0; i < 5; i++)
        cuda(cudaFree(memory[i]));
    free(rows);
}

static void bench_caches(void)
{
    static const char *const presets[] = { "quality", "balanced", "small" };
    save_calibration();
    for (int batch = 1; batch <= MOST_SEQUENCES; batch *= 8) {
        for (int i = 0; i < 6; i++)
            bench_preset(presets[i / 2], i % 2, batch, true);
        bench_preset("turboquant-4", false, batch, true);
        bench_preset("turboquant-4", false, batch, false);
        bench_preset("balanced", true, batch, false);
    }
    remove(CALIBRATION);
}

static void open_csv(const char *name)
{
    bench.csv = fopen(name, "w");
    if (!bench.csv)
        die(name, "cannot be written");
    fprintf(bench.csv, "machine,compiler,commit,command,operation,codec,batch,tokens,kv_heads,head_"
                       "dim,what,us,host us\n");
}

int main(int argc, char **argv)
{
    static struct cudaDeviceProp device_properties;
    static char command[256] = "bench_cuda_cache";
    bool append = false, cache = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--csv") == 0 && i + 1 < argc)
            open_csv(argv[++i]);
        else if (strcmp(argv[i], "--commit") == 0 && i + 1 < argc)
            bench.commit = argv[++i];
        else if (strcmp(argv[i], "--compiler") == 0 && i + 1 < argc)
            bench.compiler = argv[++i];
        else if (strcmp(argv[i], "append") == 0)
            append = true;
        else if (strcmp(argv[i], "cache") == 0)
            cache = true;
        else
            die(argv[i], "no such option");
    }
    cuda(cudaGetDeviceProperties(&device_properties, 0));
    bench.machine = device_properties.name;
    strcat(command, append ? " append" : ""), strcat(command, cache ? " cache" : "");
    bench.command = command;
    cuda(cudaStreamCreate(&bench.stream));
    cuda(cudaEventCreate(&bench.begin));
    cuda(cudaEventCreate(&bench.end));
    if (append || !cache)
        bench_append();
    if (cache || !append)
        bench_caches();
    return bench.csv && fclose(bench.csv) != 0;
}
