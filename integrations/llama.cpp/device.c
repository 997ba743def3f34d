/* device.c - see device.h.
 *
 * The device has the type GPU, because llama.cpp gives its KV cache to GPU devices (-ngl 99). It
 * supports the few operations that touch the cache and no operation that multiplies weights, so
 * weights stay on the CPU.
 */
#include "device.h"

#include <stdio.h>

#include "backend.h"
#include "buffer.h"
#include "ggml_api.h"
#include "log.h"
#include "ops.h"
#include "settings.h"

static abi_device device;
static uint8_t backend_guid[16] = { 0x6b, 0x76, 0x61, 0x6e, 0x74, 0x2d, 0x67, 0x67,
                                    0x6d, 0x6c, 0x2d, 0x62, 0x61, 0x63, 0x6b, 0x31 };

/* Back end: one instance a llama context */

static const char *device_name(void)
{
    return "KVANT";
}

static const char *backend_get_name(abi_backend *backend)
{
    (void)backend;
    return device_name();
}

static int32_t compute_node(kvp_compute *compute, abi_tensor *node)
{
    if (node->op == kvp_api.op.set_rows)
        return kvp_set_rows(compute, node);
    if (node->op == kvp_api.op.flash_attn_ext)
        return kvp_attention(compute, node);
    if (node->op == kvp_api.op.rope)
        return kvp_rope(compute, node);
    if (kvp_is_view_op(node))
        return ABI_STATUS_SUCCESS;
    kvp_error("%s: operation %s is not supported", node->name, kvp_api.op_name(node->op));
    return ABI_STATUS_FAILED;
}

static int32_t backend_graph_compute(abi_backend *backend, abi_graph *graph)
{
    return kvp_graph_compute(backend, graph, compute_node);
}

static abi_backend *device_init_backend(abi_device *self, const char *params)
{
    static const abi_backend_iface iface = { .get_name = backend_get_name,
                                             .free = kvp_backend_free,
                                             .graph_compute = backend_graph_compute };
    abi_backend *backend;
    char err[768] = "";
    bool fp32;

    (void)params;
    /* llama.cpp creates a context's back ends before its caches. */
    if (!kvp_settings_read_switch("KVANT_FP32", false, &fp32, err, sizeof(err)) ||
        !kvp_kv_new_context(err, sizeof(err))) {
        kvp_error("%s", err);
        return NULL;
    }
    backend = kvp_backend_create(self, &backend_guid, &iface);
    if (backend != NULL)
        ((kvp_compute *)backend->context)->fp32 = fp32;
    return backend;
}

/* Device */

static const char *device_get_name(abi_device *self)
{
    (void)self;
    return device_name();
}

static const char *device_get_description(abi_device *self)
{
    (void)self;
    return "compressed KV cache (kvant " KVANT_VERSION_STRING ") in system memory";
}

/* One field of /proc/meminfo, in bytes; 0 when it cannot be read, which ggml takes for "not
 * known". */
static size_t meminfo(const char *format)
{
    FILE *file = fopen("/proc/meminfo", "r");
    unsigned long long kib = 0;
    char line[128];

    while (file != NULL && fgets(line, sizeof(line), file) != NULL)
        if (sscanf(line, format, &kib) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return (size_t)kib * 1024;
}

static void device_get_memory(abi_device *self, size_t *free_bytes, size_t *total)
{
    (void)self;
    *free_bytes = meminfo("MemAvailable: %llu");
    *total = meminfo("MemTotal: %llu");
}

static int32_t device_get_type(abi_device *self)
{
    (void)self;
    return ABI_DEVICE_GPU;
}

static void device_get_props(abi_device *self, abi_device_props *props)
{
    *props = (abi_device_props){
        .name = device_get_name(self),
        .description = device_get_description(self),
        .type = ABI_DEVICE_GPU,
        .caps = { .mmap_support = true },
    };
    device_get_memory(self, &props->memory_free, &props->memory_total);
}

static abi_buft *device_get_buffer_type(abi_device *self)
{
    (void)self;
    return kvp_buft();
}

static bool device_supports_op(abi_device *self, const abi_tensor *op)
{
    (void)self;
    if (op->op == kvp_api.op.set_rows)
        return kvp_set_rows_supported(op);
    if (op->op == kvp_api.op.flash_attn_ext)
        return kvp_attention_supported(op);
    if (op->op == kvp_api.op.rope)
        return kvp_rope_supported(op);
    return kvp_is_view_op(op);
}

/* Host memory is read in place: queries, new rows and masks are not copied. */
static bool device_supports_buft(abi_device *self, abi_buft *buft)
{
    (void)self;
    return buft == kvp_buft() || kvp_api.buft_is_host(buft);
}

abi_device *kvp_device_setup(int api, abi_reg *reg)
{
    device = (abi_device){
        .iface = { .get_name = device_get_name,
                   .get_description = device_get_description,
                   .get_memory = device_get_memory,
                   .get_type = device_get_type,
                   .get_props = device_get_props,
                   .init_backend = device_init_backend,
                   .get_buffer_type = device_get_buffer_type,
                   .supports_op = device_supports_op,
                   .supports_buft = device_supports_buft },
        .reg = reg,
    };
    kvp_buft_setup(api, &device);
    return &device;
}
