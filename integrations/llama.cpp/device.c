/* device.c - see device.h.
 *
 * ggml's scheduler moves a node from the CPU back end to KVANT_ACCEL on two conditions. Both back
 * ends have the same buffer type, and KVANT_ACCEL supports the node and the buffers of its sources.
 * So the device states the CPU's buffer type, and no tensor is ever copied.
 *
 * llama.cpp gives every context an instance of every ACCEL device. KVANT_ACCEL decides when a
 * context is created, because a process may create contexts with and without the device (kvant
 * bench model). Unwanted instances belong to a second device object, which supports nothing. */
#include "device.h"

#include <stdlib.h>

#include "buffer.h"
#include "cpu_graph.h"
#include "cpu_rows.h"
#include "ggml_api.h"
#include "host.h"
#include "kv_store.h"
#include "log.h"
#include "ops.h"
#include "settings.h"

/* The number of threads until llama.cpp sets it, which it does before every graph. */
#define DEFAULT_N_THREADS 2

struct operation {
    const int32_t *op; /* ggml's number of the operation, found at load time */
    bool (*supported)(const abi_tensor *node);
    int32_t (*compute)(kvp_compute *compute, abi_tensor *node);
};

/* The differences between the devices; the context of an abi_device. */
struct kind {
    const char *name, *description;
    int32_t type;
    uint8_t guid[16];
    bool views; /* the device accepts operations that compute nothing, too */
    struct operation operations[3];
};

static struct kind cache_kind = {
    .name = "KVANT",
    .description = "compressed KV cache (kvant " KVANT_VERSION_STRING ") in system memory",
    .type = ABI_DEVICE_GPU,
    .guid = { 0x6b, 0x76, 0x61, 0x6e, 0x74, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x2d, 0x62, 0x61, 0x63,
              0x6b, 0x31 },
    .views = true,
    .operations = { { &kvp_api.op.set_rows, kvp_set_rows_supported, kvp_set_rows },
                    { &kvp_api.op.flash_attn_ext, kvp_attention_supported, kvp_attention },
                    { &kvp_api.op.rope, kvp_rope_supported, kvp_rope } },
};
static struct kind accel_kind = {
    .name = "KVANT_ACCEL",
    .description = "attention over llama.cpp's own KV cache (kvant " KVANT_VERSION_STRING ")",
    .type = ABI_DEVICE_ACCEL,
    .guid = { 0x6b, 0x76, 0x61, 0x6e, 0x74, 0x2d, 0x67, 0x67, 0x6d, 0x6c, 0x2d, 0x61, 0x63, 0x63,
              0x65, 0x6c },
    .operations = { { &kvp_api.op.flash_attn_ext, kvp_block_attention_supported,
                      kvp_block_attention } },
};
static abi_device cache_device, accel_device, dormant_device;
static const char *cache_device_id;

static const struct operation *operation_of(const struct kind *kind, const abi_tensor *node)
{
    for (size_t i = 0; i < sizeof(kind->operations) / sizeof(kind->operations[0]); i++)
        if (kind->operations[i].op != NULL && *kind->operations[i].op == node->op)
            return &kind->operations[i];
    return NULL;
}

/* Back ends: one instance per llama context and device */

static const char *backend_get_name(abi_backend *backend)
{
    return ((const struct kind *)backend->device->context)->name;
}

static void free_workspace(kvp_compute *compute)
{
    if (compute->workspace != NULL)
        kvp_host_release(compute->workspace, compute->workspace_bytes);
    compute->workspace = NULL;
    compute->workspace_bytes = 0;
}

/* The largest workspace that is kept between graphs. A long prompt needs megabytes, which go back
 * to the system when tokens are generated one by one. A token needs less than this, and keeping it
 * saves the allocation. */
#define KEPT_WORKSPACE ((size_t)1 << 20)

void *kvp_compute_workspace(kvp_compute *compute, size_t bytes)
{
    const size_t most =
        bytes <= SIZE_MAX / 8 && bytes > KEPT_WORKSPACE / 8 ? 8 * bytes : KEPT_WORKSPACE;

    if (bytes <= compute->workspace_bytes && compute->workspace_bytes <= most)
        return compute->workspace;
    free_workspace(compute);
    compute->workspace = kvp_host_reserve(bytes);
    compute->workspace_bytes = compute->workspace != NULL ? bytes : 0;
    if (compute->workspace != NULL && !kvp_host_commit(compute->workspace, bytes))
        free_workspace(compute);
    return compute->workspace;
}

void kvp_compute_free(kvp_compute *compute)
{
    kvp_cpu_graph_forget(compute);
    free_workspace(compute);
    free(compute->masks);
    free(compute->table);
    kvp_kv_context_release(compute->layers);
    kvp_host_threads_release(&compute->host_threads);
    if (compute->cpu != NULL)
        kvp_api.backend_free(compute->cpu);
    free(compute);
}

static void backend_free(abi_backend *backend)
{
    kvp_compute_free(backend->context);
    free(backend);
}

void kvp_compute_set_n_threads(kvp_compute *compute, int n_threads)
{
    compute->n_threads =
        kvp_host_threads_update(&compute->host_threads, n_threads > 0 ? (uint32_t)n_threads : 1);
}

void kvp_backend_set_n_threads(abi_backend *backend, int n_threads)
{
    kvp_compute *compute = backend->context;

    kvp_kv_context_check(compute->layers);
    kvp_cpu_graph_expect(NULL);
    kvp_cpu_graph_begin(compute->layers);
    kvp_compute_set_n_threads(compute, n_threads);
}

/* A cache whose rows are in place goes to pages before the device KVANT computes on it. */
static bool leaves_place(const kvp_compute *compute, const abi_tensor *node)
{
    const abi_tensor *cache = kvp_cache_tensor_of(node);
    const kvp_kv *kv = cache != NULL ? kvp_kv_of(cache) : NULL;

    return kv == NULL || !kv->in_place || kvp_cpu_rows_leave(kv, compute->n_threads) == KVANT_OK;
}

static int32_t compute_node(const struct kind *kind, kvp_compute *compute, abi_tensor *node)
{
    const struct operation *operation = operation_of(kind, node);

    if (kvp_is_refused(node))
        return ABI_STATUS_FAILED;
    if (operation != NULL && kind == &cache_kind && !leaves_place(compute, node))
        return ABI_STATUS_ALLOC_FAILED;
    if (operation != NULL)
        return operation->compute(compute, node);
    kvp_error("%s: operation %s on a compressed cache is not supported; leave out --device KVANT, "
              "and report the model",
              node->name, kvp_api.op_name(node->op));
    return ABI_STATUS_FAILED;
}

/* The first node from number *i on that computes something, or NULL; *i becomes its number. */
static abi_tensor *next_node(abi_graph *graph, int *i)
{
    for (int n = kvp_api.graph_n_nodes(graph); *i < n; (*i)++) {
        abi_tensor *node = kvp_api.graph_node(graph, *i);
        if (kvp_is_computed(node))
            return node;
    }
    return NULL;
}

/* A graph that is being computed. */
struct job {
    const struct kind *kind;
    kvp_compute *compute;
    abi_graph *graph;
    int32_t status;
};

/* Computes the nodes of the graph in order, until one fails. */
static void compute_nodes(void *user)
{
    struct job *job = user;
    kvp_compute *compute = job->compute;
    int i = 0;

    compute->keys = NULL;
    for (abi_tensor *node = next_node(job->graph, &i), *next;
         node != NULL && job->status == ABI_STATUS_SUCCESS; node = next) {
        i++;
        compute->next = next = next_node(job->graph, &i);
        job->status = compute_node(job->kind, compute, node);
    }
    if (compute->held.is_held && kvp_kv_store_held(&compute->held, compute->n_threads) != KVANT_OK)
        job->status = ABI_STATUS_FAILED; /* the attention node failed before */
}

static int32_t compute_graph(const struct kind *kind, kvp_compute *compute, abi_graph *graph)
{
    struct job job = { kind, compute, graph, ABI_STATUS_SUCCESS };

    kvp_host_threads_compute(&compute->host_threads, compute_nodes, &job);
    return job.status;
}

int32_t kvp_compute_cache_nodes(kvp_compute *compute, abi_graph *graph)
{
    struct job job = { &cache_kind, compute, graph, ABI_STATUS_SUCCESS };

    compute_nodes(&job);
    return job.status;
}

int32_t kvp_compute_cache_graph(kvp_compute *compute, abi_graph *graph)
{
    return compute_graph(&cache_kind, compute, graph);
}

static int32_t backend_graph_compute(abi_backend *backend, abi_graph *graph)
{
    kvp_cpu_graph_expect(NULL); /* other CPU back ends belong to no context */
    kvp_invalid_graph_begins();
    kvp_log_graph_begins();
    return kvp_log_graph_ends(compute_graph(backend->device->context, backend->context, graph),
                              backend->device->iface.get_name(backend->device));
}

/* NULL without memory, or with a message. */
static kvp_compute *compute_create(bool fp32)
{
    kvp_compute *compute = NULL;
    char err[256] = "";
    bool lend;

    if (!kvp_settings_read_switch("KVANT_HOST_THREADS", true, &lend, err, sizeof(err)))
        kvp_error("%s", err);
    else
        compute = calloc(1, sizeof(*compute));
    if (compute == NULL)
        return NULL;
    if (lend) {
        kvp_host_threads_use(&compute->host_threads);
        kvp_cpu_graph_use();
    }
    compute->n_threads = DEFAULT_N_THREADS;
    compute->fp32 = fp32;
    return compute;
}

/* llama.cpp creates a context's back ends before its caches. */
kvp_compute *kvp_compute_create_for_cache(void)
{
    kvp_compute *compute = NULL;
    char err[768] = "";
    bool fp32;

    if (!kvp_settings_read_switch("KVANT_FP32", false, &fp32, err, sizeof(err)) ||
        !kvp_kv_new_context(err, sizeof(err)))
        kvp_error("%s", err);
    else
        compute = compute_create(fp32);
    if (compute != NULL)
        compute->layers = kvp_kv_context();
    return compute;
}

/* compute: NULL fails; freed with the back end, or at once without memory. */
static abi_backend *backend_create(abi_device *device, kvp_compute *compute)
{
    static const abi_backend_iface iface = { .get_name = backend_get_name,
                                             .free = backend_free,
                                             .graph_compute = backend_graph_compute };
    abi_backend *backend = compute != NULL ? calloc(1, sizeof(*backend)) : NULL;

    if (backend != NULL)
        *backend = (abi_backend){ .guid = &((struct kind *)device->context)->guid,
                                  .iface = iface,
                                  .device = device,
                                  .context = compute };
    else if (compute != NULL)
        kvp_compute_free(compute);
    return backend;
}

static abi_backend *cache_init_backend(abi_device *self, const char *params)
{
    kvp_compute *compute = kvp_compute_create_for_cache();
    abi_backend *backend = backend_create(self, compute);

    (void)params;
    kvp_cpu_graph_expect(backend != NULL && compute->host_threads.wanted ? compute : NULL);
    return backend;
}

static abi_backend *accel_init_backend(abi_device *self, const char *params)
{
    char err[256] = "";
    bool wanted = false;

    (void)self;
    (void)params;
    if (!kvp_settings_read_switch("KVANT_ACCEL", false, &wanted, err, sizeof(err)))
        kvp_error("%s", err);
    if (wanted)
        kvp_report("context");
    return backend_create(wanted ? &accel_device : &dormant_device, compute_create(false));
}

/* Devices */

static const char *device_get_name(abi_device *self)
{
    return ((const struct kind *)self->context)->name;
}

static const char *device_get_description(abi_device *self)
{
    return ((const struct kind *)self->context)->description;
}

static int32_t device_get_type(abi_device *self)
{
    return ((const struct kind *)self->context)->type;
}

/* A device without its own memory reports 0 of 0 bytes. */
static void device_get_memory(abi_device *self, size_t *free_bytes, size_t *total)
{
    *free_bytes = *total = 0;
    if (self == &cache_device)
        kvant_os_memory(free_bytes, total);
}

static void device_get_props(abi_device *self, abi_device_props *props)
{
    *props = (abi_device_props){ .name = device_get_name(self),
                                 .description = device_get_description(self),
                                 .type = device_get_type(self),
                                 .device_id = self == &cache_device ? cache_device_id : NULL,
                                 .caps = { .mmap_support = true } };
    device_get_memory(self, &props->memory_free, &props->memory_total);
}

static abi_buft *device_get_buffer_type(abi_device *self)
{
    return self == &cache_device ? kvp_buft() : kvp_api.cpu_buffer_type();
}

static bool has_operation(const struct kind *kind, const abi_tensor *op)
{
    const struct operation *operation = operation_of(kind, op);

    return operation != NULL ? operation->supported(op) : kind->views && kvp_is_cache_view(op);
}

bool kvp_cache_supports(const abi_tensor *op)
{
    return has_operation(&cache_kind, op) || kvp_is_unserved(op);
}

static bool device_supports_op(abi_device *self, const abi_tensor *op)
{
    const abi_tensor *cache;

    if (self != &cache_device)
        return self == &accel_device && has_operation(self->context, op);
    kvp_note_other_cache(op);
    cache = kvp_cache_tensor_of(op);
    if (cache != NULL && kvp_cpu_graph_takes(cache))
        return false;
    if (kvp_cache_supports(op))
        return true;
    if (cache != NULL)
        kvp_cpu_graph_end(cache);
    return false;
}

/* Host memory is read in place, so queries, new rows and masks are not copied. */
static bool device_supports_buft(abi_device *self, abi_buft *buft)
{
    return (self == &cache_device && buft == kvp_buft()) || kvp_api.buft_is_host(buft);
}

static abi_device device_of(struct kind *kind, abi_reg *reg,
                            abi_backend *(*init_backend)(abi_device *self, const char *params))
{
    return (abi_device){
        .iface = { .get_name = device_get_name,
                   .get_description = device_get_description,
                   .get_memory = device_get_memory,
                   .get_type = device_get_type,
                   .get_props = device_get_props,
                   .init_backend = init_backend,
                   .get_buffer_type = device_get_buffer_type,
                   .supports_op = device_supports_op,
                   .supports_buft = device_supports_buft },
        .reg = reg,
        .context = kind,
    };
}

abi_device *kvp_device_setup(int api, abi_reg *reg)
{
    cache_device = device_of(&cache_kind, reg, cache_init_backend);
    kvp_buft_setup(api, &cache_device);
    return &cache_device;
}

void kvp_device_hide_behind(const char *id, int32_t type)
{
    cache_device_id = id;
    cache_kind.type = type;
}

abi_device *kvp_accel_setup(abi_reg *reg)
{
    accel_device = dormant_device = device_of(&accel_kind, reg, accel_init_backend);
    return &accel_device;
}
