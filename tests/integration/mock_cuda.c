/* mock_cuda.c - a mock of ggml-cuda: a ggml back end with the device "CUDA0" and, with
 * KVANT_TEST_GPUS=2, "CUDA1". Their memory is the computer's memory, and the CPU back end's kernels
 * compute, on streams of the mock driver (tests/cuda/host).
 *
 * As with CUDA, a graph that is computed while its stream is captured is only recorded. It is
 * computed when the captured graph is launched. With two devices, llama.cpp runs batches in a
 * pipeline.
 *
 * The mock's buffers are no host buffers, so llama.cpp calls their functions, as with a GPU. The
 * mock refuses tensors in memory of another label, as ggml-cuda does. */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-backend-impl.h"
#include "ggml-cpu.h"
#include "ggml-impl.h"

typedef void work(void *data);

static struct {
    bool (*record)(void *stream, work *run, const void *data, size_t bytes);
    int (*stream_new)(void **stream, unsigned flags);
    int (*stream_free)(void *stream);
    void (*finish)(void *stream);
    int (*stream_wait)(void *stream, void *event, unsigned flags);
    int (*event_record)(void *event, void *stream);
    int (*event_new)(void **event, unsigned flags);
    int (*event_free)(void *event);
    int (*context_get)(void **context, int device);
    int (*context_set)(void *context);
    int (*memory_new)(unsigned long long *memory, size_t bytes);
    int (*memory_free)(unsigned long long memory);
    unsigned long (*sealed)(void);
    void (*writes)(void *stream, const void *at);
} driver;

enum { MOST = 2 };

static struct ggml_backend_reg reg;
static struct gpu {
    struct ggml_backend_device device;
    struct ggml_backend_buffer_type buft;
    void *context; /* the driver's context */
    const char *name, *id;
} gpus[MOST] = { { .name = "CUDA0", .id = "0000:00:00.0" },
                 { .name = "CUDA1", .id = "0000:01:00.0" } };
static size_t n_gpus;
static unsigned long n_direct, n_recorded, n_synchronized;

/* Each context has its own threads, so the counter is atomic. */
static void count(unsigned long *n)
{
    __atomic_fetch_add(n, 1, __ATOMIC_RELAXED);
}

static struct gpu *gpu_of(ggml_backend_dev_t device)
{
    return (struct gpu *)device->context; /* a derived device has it, too */
}

/* Buffers */

static void buffer_free(ggml_backend_buffer_t buffer)
{
    driver.memory_free((uintptr_t)buffer->context);
}

static void *buffer_base(ggml_backend_buffer_t buffer)
{
    return buffer->context;
}

static void buffer_memset(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, uint8_t value,
                          size_t offset, size_t size)
{
    memset((char *)tensor->data + offset, value, size);
}

/* KVANT_TEST_SLOW_INPUTS: a pause between the inputs of a graph, in which other contexts copy their
 * inputs. */
static void buffer_set(ggml_backend_buffer_t buffer, struct ggml_tensor *tensor, const void *data,
                       size_t offset, size_t size)
{
    if (tensor->type == GGML_TYPE_I32 && getenv("KVANT_TEST_SLOW_INPUTS") != NULL)
        nanosleep(&(struct timespec){ .tv_nsec = 3000000 }, NULL);
    memcpy((char *)tensor->data + offset, data, size);
}

static void buffer_get(ggml_backend_buffer_t buffer, const struct ggml_tensor *tensor, void *data,
                       size_t offset, size_t size)
{
    memcpy(data, (const char *)tensor->data + offset, size);
}

static bool buffer_copy(ggml_backend_buffer_t buffer, const struct ggml_tensor *src,
                        struct ggml_tensor *dst)
{
    if (src->buffer->buft != buffer->buft)
        return false;
    memcpy(dst->data, src->data, ggml_nbytes(src));
    return true;
}

static void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value)
{
    memset(buffer->context, value, buffer->size);
}

/* Buffer type */

static const char *buft_name(ggml_backend_buffer_type_t self)
{
    return gpu_of(self->device)->name;
}

static ggml_backend_buffer_t buft_alloc(ggml_backend_buffer_type_t self, size_t size)
{
    static const struct ggml_backend_buffer_i iface = { .free_buffer = buffer_free,
                                                        .get_base = buffer_base,
                                                        .memset_tensor = buffer_memset,
                                                        .set_tensor = buffer_set,
                                                        .get_tensor = buffer_get,
                                                        .cpy_tensor = buffer_copy,
                                                        .clear = buffer_clear };
    unsigned long long memory;

    driver.context_set(gpu_of(self->device)->context);
    if (driver.memory_new(&memory, size + 128) != 0)
        return NULL;
    memset((void *)(uintptr_t)memory, 0x5a, size); /* a GPU's memory is not zeroed */
    return ggml_backend_buffer_init(self, iface, (void *)(uintptr_t)memory, size);
}

static size_t buft_alignment(ggml_backend_buffer_type_t self)
{
    return 128;
}

static size_t buft_alloc_size(ggml_backend_buffer_type_t self, const struct ggml_tensor *tensor)
{
    return ggml_nbytes(tensor);
}

/* Back end */

enum { MOST_NUMBERED = 4096 };

typedef struct instance {
    struct gpu *gpu;
    ggml_backend_t cpu;
    void *stream;
    struct numbered { /* the last graph of each number (uid) */
        uint64_t uid, hash;
    } numbered[MOST_NUMBERED];
} instance;

typedef struct recorded {
    ggml_backend_t cpu;
    struct ggml_cgraph graph;
    struct ggml_tensor *nodes[];
} recorded;

static const char *backend_name(ggml_backend_t backend)
{
    return ((instance *)backend->context)->gpu->name;
}

static void backend_free(ggml_backend_t backend)
{
    instance *self = backend->context;

    ggml_backend_free(self->cpu);
    driver.stream_free(self->stream);
    free(self);
    free(backend);
}

static void backend_synchronize(ggml_backend_t backend)
{
    driver.finish(((instance *)backend->context)->stream);
    count(&n_synchronized);
}

/* Whether the mask hides a cell from all query tokens of a node with one stream. */
static bool is_hidden(const struct ggml_tensor *mask, int64_t cell, int64_t n_tokens)
{
    const uint16_t minus_infinity = 0xfc00;
    bool hidden = true;

    for (int64_t i = 0; i < n_tokens && hidden; i++)
        hidden = ((const uint16_t *)((const char *)mask->data + (size_t)i * mask->nb[1]))[cell] ==
                 minus_infinity;
    return hidden;
}

static bool row_is_finite(const struct ggml_tensor *rows, int64_t cell)
{
    bool finite = true;

    for (int64_t head = 0; head < rows->ne[2]; head++) {
        const uint16_t *row = (const void *)((const char *)rows->data + (size_t)cell * rows->nb[1] +
                                             (size_t)head * rows->nb[2]);
        for (int64_t i = 0; i < rows->ne[0]; i++)
            finite = finite && (row[i] & 0x7c00) != 0x7c00;
    }
    return finite;
}

/* ggml-cuda multiplies the values of hidden cells by 0, which is NaN if they are not finite. The
 * CPU back end leaves hidden cells out. With KVANT_TEST_HIDDEN the mock refuses such cells. */
static void check_hidden_rows(const struct ggml_tensor *node)
{
    const struct ggml_tensor *k = node->src[1], *v = node->src[2], *mask = node->src[3];

    if (node->op != GGML_OP_FLASH_ATTN_EXT || k->type != GGML_TYPE_F16 ||
        v->type != GGML_TYPE_F16 || mask == NULL || node->src[0]->ne[3] > 1)
        return;
    for (int64_t cell = 0; cell < k->ne[1]; cell++)
        if (is_hidden(mask, cell, node->src[0]->ne[1]) &&
            !(row_is_finite(k, cell) && row_is_finite(v, cell))) {
            fprintf(stderr, "mock of CUDA: %s: hidden cell %lld is not finite\n", node->name,
                    (long long)cell);
            abort();
        }
}

static void replay(void *data)
{
    recorded *r = data;

    r->graph.nodes = r->nodes;
    for (int i = 0; i < r->graph.n_nodes && getenv("KVANT_TEST_HIDDEN") != NULL; i++)
        check_hidden_rows(r->nodes[i]);
    if (ggml_backend_graph_compute(r->cpu, &r->graph) != GGML_STATUS_SUCCESS)
        abort();
}

/* Whether a tensor lies in memory that ggml-cuda would not read: ggml-cuda reads its own memory. */
static bool is_foreign(const struct gpu *gpu, const struct ggml_tensor *t)
{
    const struct ggml_tensor *root = t->view_src != NULL ? t->view_src : t;

    return root->buffer != NULL && root->buffer->buft != &gpu->buft &&
           !ggml_backend_buft_is_host(root->buffer->buft);
}

static bool reads_foreign(const struct gpu *gpu, const struct ggml_tensor *node)
{
    bool foreign = is_foreign(gpu, node);

    for (int i = 0; i < GGML_MAX_SRC; i++)
        foreign = foreign || (node->src[i] != NULL && is_foreign(gpu, node->src[i]));
    return foreign && !ggml_is_empty(node) && node->op != GGML_OP_VIEW &&
           node->op != GGML_OP_PERMUTE && node->op != GGML_OP_RESHAPE &&
           node->op != GGML_OP_TRANSPOSE && node->op != GGML_OP_NONE;
}

/* A cache that is f16 in place is given to CUDA with kvant's label. The graph does not show whether
 * it is in place. */
static bool may_be_in_place(void)
{
    const char *exact = getenv("KVANT_EXACT");

    return exact == NULL || strcmp(exact, "0") != 0;
}

static uint64_t mix(uint64_t hash, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t hash_of(const struct ggml_cgraph *graph)
{
    uint64_t hash = mix(0xcbf29ce484222325u, &graph->n_nodes, sizeof(graph->n_nodes));

    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor *node = graph->nodes[i];
        hash = mix(hash, &node->op, sizeof(node->op));
        hash = mix(hash, node->ne, sizeof(node->ne));
        hash = mix(hash, node->nb, sizeof(node->nb));
        hash = mix(hash, node->op_params, sizeof(node->op_params));
        hash = mix(hash, &node->data, sizeof(node->data));
        for (int j = 0; j < GGML_MAX_SRC && node->src[j] != NULL; j++)
            hash = mix(hash, &node->src[j]->data, sizeof(node->src[j]->data));
    }
    return hash;
}

/* ggml-cuda does not compare the nodes of a graph whose number it knows: it launches the former
 * graph with this number, which it captured. So a known number with other nodes is an error. */
static bool is_mistaken(instance *self, const struct ggml_cgraph *graph)
{
    struct numbered *former = &self->numbered[graph->uid % MOST_NUMBERED];
    const struct numbered now = { graph->uid, hash_of(graph) };
    const bool mistaken = former->uid == now.uid && former->hash != now.hash;

    *former = now;
    return graph->uid != 0 && mistaken;
}

/* Notes that a graph stores rows of tensors, which lessons on other streams may have read. */
static void note_writes(const instance *self, const struct ggml_cgraph *graph)
{
    for (int i = 0; i < graph->n_nodes; i++)
        if (graph->nodes[i]->op == GGML_OP_SET_ROWS)
            driver.writes(self->stream, graph->nodes[i]->data);
}

/* KVANT_TEST_PARTS: a line for each graph, or part of a graph, that this back end computes. It says
 * how many blocks this thread has sealed by then. */
static enum ggml_status backend_compute(ggml_backend_t backend, struct ggml_cgraph *graph)
{
    instance *self = backend->context;
    const size_t bytes = sizeof(recorded) + (size_t)graph->n_nodes * sizeof(*graph->nodes);
    recorded *r;
    bool captured;

    for (int i = 0; i < graph->n_nodes; i++)
        if (!may_be_in_place() && reads_foreign(self->gpu, graph->nodes[i])) {
            fprintf(stderr, "mock of CUDA: %s (%s) is not in its memory\n", graph->nodes[i]->name,
                    ggml_op_name(graph->nodes[i]->op));
            abort();
        }
    if (is_mistaken(self, graph)) {
        fprintf(stderr, "mock of CUDA: another graph has the number %llu\n",
                (unsigned long long)graph->uid);
        abort();
    }
    driver.context_set(self->gpu->context);
    r = malloc(bytes);
    r->cpu = self->cpu;
    r->graph = *graph;
    memcpy(r->nodes, graph->nodes, (size_t)graph->n_nodes * sizeof(*graph->nodes));
    captured = driver.record(self->stream, replay, r, bytes);
    if (!captured) {
        note_writes(self, graph);
        replay(r);
    }
    count(captured ? &n_recorded : &n_direct);
    if (getenv("KVANT_TEST_PARTS") != NULL)
        fprintf(stderr, "stand-in of CUDA: a part of %d nodes, %lu blocks are sealed\n",
                graph->n_nodes, driver.sealed());
    free(r);
    return GGML_STATUS_SUCCESS;
}

static void backend_event_record(ggml_backend_t backend, ggml_backend_event_t event)
{
    driver.event_record(event->context, ((instance *)backend->context)->stream);
}

static void backend_event_wait(ggml_backend_t backend, ggml_backend_event_t event)
{
    driver.stream_wait(((instance *)backend->context)->stream, event->context, 0);
}

/* More threads would wait for one another by spinning. */
static void use_one_thread(ggml_backend_t cpu)
{
    ggml_backend_set_n_threads_t set;
    void *symbol = ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(cpu)), "ggml_backend_set_n_threads");

    memcpy(&set, &symbol, sizeof(symbol));
    set(cpu, 1);
}

static ggml_backend_t device_init(ggml_backend_dev_t dev, const char *params)
{
    static ggml_guid guid = "kvant mock CUDA";
    static const struct ggml_backend_i iface = { .get_name = backend_name,
                                                 .free = backend_free,
                                                 .synchronize = backend_synchronize,
                                                 .graph_compute = backend_compute,
                                                 .event_record = backend_event_record,
                                                 .event_wait = backend_event_wait };
    ggml_backend_t backend = calloc(1, sizeof(*backend));
    instance *self = calloc(1, sizeof(*self));

    self->gpu = gpu_of(dev);
    driver.context_set(self->gpu->context);
    self->cpu =
        ggml_backend_dev_init(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), params);
    use_one_thread(self->cpu);
    driver.stream_new(&self->stream, 1);
    *backend =
        (struct ggml_backend){ .guid = &guid, .iface = iface, .device = dev, .context = self };
    return backend;
}

/* Device */

static const char *device_name(ggml_backend_dev_t dev)
{
    return gpu_of(dev)->name;
}

static void device_memory(ggml_backend_dev_t dev, size_t *free_bytes, size_t *total)
{
    *free_bytes = *total = (size_t)8 << 30;
}

static enum ggml_backend_dev_type device_type(ggml_backend_dev_t dev)
{
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

static void device_props(ggml_backend_dev_t dev, struct ggml_backend_dev_props *props)
{
    *props = (struct ggml_backend_dev_props){ .name = gpu_of(dev)->name,
                                              .description = "mock",
                                              .type = GGML_BACKEND_DEVICE_TYPE_GPU,
                                              .device_id = gpu_of(dev)->id,
                                              .caps = { .async = true, .events = true } };
    device_memory(dev, &props->memory_free, &props->memory_total);
}

static ggml_backend_buffer_type_t device_buft(ggml_backend_dev_t dev)
{
    return &gpu_of(dev)->buft;
}

static ggml_backend_event_t device_event_new(ggml_backend_dev_t dev)
{
    ggml_backend_event_t event = malloc(sizeof(*event));

    event->device = dev;
    driver.event_new(&event->context, 2);
    return event;
}

static void device_event_free(ggml_backend_dev_t dev, ggml_backend_event_t event)
{
    driver.event_free(event->context);
    free(event);
}

static void device_event_synchronize(ggml_backend_dev_t dev, ggml_backend_event_t event)
{
}

/* KVANT_TEST_RENAME: positions get a name that no version of llama.cpp gives them. llama.cpp calls
 * this function before it copies inputs, so copies have the name, too. */
static bool device_supports_op(ggml_backend_dev_t dev, const struct ggml_tensor *op)
{
    if (op->op == GGML_OP_ROPE && op->src[1]->op == GGML_OP_NONE &&
        getenv("KVANT_TEST_RENAME") != NULL)
        ggml_set_name(op->src[1], "where_tokens_are");
    return ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
}

static bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t of)
{
    return of == &gpu_of(dev)->buft;
}

/* Registry */

static const char *reg_name(ggml_backend_reg_t self)
{
    return "CUDA";
}

static size_t reg_count(ggml_backend_reg_t self)
{
    return n_gpus;
}

static ggml_backend_dev_t reg_device(ggml_backend_reg_t self, size_t index)
{
    return index < n_gpus ? &gpus[index].device : NULL;
}

static void *reg_address(ggml_backend_reg_t self, const char *name)
{
    return strcmp(name, "mock_direct") == 0         ? (void *)&n_direct
           : strcmp(name, "mock_recorded") == 0     ? (void *)&n_recorded
           : strcmp(name, "mock_synchronized") == 0 ? (void *)&n_synchronized
                                                    : NULL;
}

static bool look_up(void *library, const char *name, void *slot)
{
    void *symbol = dlsym(library, name);

    memcpy(slot, &symbol, sizeof(symbol));
    return symbol != NULL;
}

static void set_up(struct gpu *gpu, int number)
{
    driver.context_get(&gpu->context, number);
    gpu->buft = (struct ggml_backend_buffer_type){ .iface = { .get_name = buft_name,
                                                              .alloc_buffer = buft_alloc,
                                                              .get_alignment = buft_alignment,
                                                              .get_alloc_size = buft_alloc_size },
                                                   .device = &gpu->device };
    gpu->device =
        (struct ggml_backend_device){ .iface = { .get_name = device_name,
                                                 .get_description = device_name,
                                                 .get_memory = device_memory,
                                                 .get_type = device_type,
                                                 .get_props = device_props,
                                                 .init_backend = device_init,
                                                 .get_buffer_type = device_buft,
                                                 .supports_op = device_supports_op,
                                                 .supports_buft = device_supports_buft,
                                                 .event_new = device_event_new,
                                                 .event_free = device_event_free,
                                                 .event_synchronize = device_event_synchronize },
                                      .reg = &reg,
                                      .context = gpu };
}

GGML_BACKEND_API ggml_backend_reg_t ggml_backend_init(void);

ggml_backend_reg_t ggml_backend_init(void)
{
    const struct {
        const char *name;
        void *slot;
    } symbols[] = { { "host_record", &driver.record },
                    { "cuStreamCreate", &driver.stream_new },
                    { "cuStreamDestroy_v2", &driver.stream_free },
                    { "host_finish", &driver.finish },
                    { "cuStreamWaitEvent", &driver.stream_wait },
                    { "cuEventRecord", &driver.event_record },
                    { "cuEventCreate", &driver.event_new },
                    { "cuEventDestroy_v2", &driver.event_free },
                    { "cuDevicePrimaryCtxRetain", &driver.context_get },
                    { "cuCtxSetCurrent", &driver.context_set },
                    { "cuMemAlloc_v2", &driver.memory_new },
                    { "cuMemFree_v2", &driver.memory_free },
                    { "host_sealed", &driver.sealed },
                    { "host_writes", &driver.writes } };
    void *library = dlopen("libcuda.so.1", RTLD_NOW);

    for (size_t i = 0; i < sizeof(symbols) / sizeof(symbols[0]); i++)
        if (library == NULL || !look_up(library, symbols[i].name, symbols[i].slot)) {
            fprintf(stderr, "mock of CUDA: no driver: %s\n", dlerror());
            return NULL;
        }
    n_gpus = getenv("KVANT_TEST_GPUS") != NULL
                 ? (size_t)atoi(getenv("KVANT_TEST_GPUS")) % (MOST + 1)
                 : 1;
    for (size_t i = 0; i < n_gpus; i++)
        set_up(&gpus[i], (int)i);
    reg = (struct ggml_backend_reg){ .api_version = GGML_BACKEND_API_VERSION,
                                     .iface = { reg_name, reg_count, reg_device, reg_address } };
    return &reg;
}
