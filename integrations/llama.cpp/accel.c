/* accel.c - see accel.h.
 *
 * ggml's scheduler moves a node from the CPU back end to this back end on two conditions: both have
 * the same buffer type, and this back end supports the node and the buffers of its sources. So the
 * device states the CPU's buffer type, and no tensor is ever copied.
 *
 * llama.cpp gives every context an instance of every ACCEL device. KVANT_ACCEL decides when a
 * context is created, because a process may create contexts with and without the device (kvant
 * bench model). Unwanted instances belong to a second device object, which supports nothing. */
#include "accel.h"

#include "backend.h"
#include "ggml_api.h"
#include "log.h"
#include "ops.h"
#include "settings.h"

static abi_device active, dormant;
static uint8_t backend_guid[16] = { 0x6b, 0x76, 0x61, 0x6e, 0x74, 0x2d, 0x67, 0x67,
                                    0x6d, 0x6c, 0x2d, 0x61, 0x63, 0x63, 0x65, 0x6c };

static const char *device_get_name(abi_device *self)
{
    (void)self;
    return "KVANT_ACCEL";
}

static const char *device_get_description(abi_device *self)
{
    (void)self;
    return "attention over llama.cpp's own KV cache (kvant " KVANT_VERSION_STRING ")";
}

static const char *backend_get_name(abi_backend *backend)
{
    return device_get_name(backend->device);
}

static bool takes(const abi_tensor *op)
{
    return op->op == kvp_api.op.flash_attn_ext && kvp_block_attention_supported(op);
}

static int32_t compute_node(kvp_compute *compute, abi_tensor *node)
{
    if (takes(node))
        return kvp_block_attention(compute, node);
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
    char err[256] = "";
    bool wanted = false;

    (void)self;
    (void)params;
    if (!kvp_settings_read_switch("KVANT_ACCEL", false, &wanted, err, sizeof(err)))
        kvp_error("%s", err);
    return kvp_backend_create(wanted ? &active : &dormant, &backend_guid, &iface);
}

/* 0 of 0 bytes is how devices without memory of their own answer. */
static void device_get_memory(abi_device *self, size_t *free_bytes, size_t *total)
{
    (void)self;
    *free_bytes = 0;
    *total = 0;
}

static int32_t device_get_type(abi_device *self)
{
    (void)self;
    return ABI_DEVICE_ACCEL;
}

static void device_get_props(abi_device *self, abi_device_props *props)
{
    *props = (abi_device_props){ .name = device_get_name(self),
                                 .description = device_get_description(self),
                                 .type = ABI_DEVICE_ACCEL,
                                 .caps = { .mmap_support = true } };
}

static abi_buft *device_get_buffer_type(abi_device *self)
{
    (void)self;
    return kvp_api.cpu_buffer_type();
}

static bool device_supports_op(abi_device *self, const abi_tensor *op)
{
    return self == &active && takes(op);
}

static bool device_supports_buft(abi_device *self, abi_buft *buft)
{
    (void)self;
    return kvp_api.buft_is_host(buft);
}

abi_device *kvp_accel_setup(abi_reg *reg)
{
    active = (abi_device){
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
    dormant = active;
    return &active;
}
