/* offload.c - see offload.h: the devices and their buffer types. offload_graph.c has the back ends.
 *
 * Each device gets two more buffer types. llama.cpp sees the first in place of the device's own. It
 * makes buffers of the device, with the device's own label, for everything but caches. Caches get
 * the second as their label. ggml's scheduler gives an operation on a cache to the back end that
 * accepts the label. */
#include "offload.h"

#include <stdio.h>
#include <string.h>

#include "buffer.h"
#include "buffer_requests.h"
#include "device.h"
#include "ggml_api.h"
#include "log.h"
#include "offload_graph.h"

/* More GPUs than a computer has, counted once for each of their back ends. */
#define MAX_OFFLOADS 32

struct offload {
    abi_device *device;
    abi_device_iface inner; /* the device's own functions */
    abi_buft *inner_buft;   /* the device's own buffer type */
    abi_any_buft buft, label;
    char description[160];
    void *(*get_proc_address)(abi_reg *reg, const char *name); /* of the device's registry */
};

static struct offload offloads[MAX_OFFLOADS];
static size_t n_offloads;

static struct offload *of_device(const abi_device *device)
{
    size_t i = 0;

    while (offloads[i].device != device)
        i++;
    return &offloads[i];
}

/* Buffer types */

static struct offload *of_buft(const abi_buft *buft)
{
    size_t i = 0;

    while ((abi_buft *)&offloads[i].buft != buft)
        i++;
    return &offloads[i];
}

/* The bytes that a tensor takes of the device's memory. A compressed cache takes none, but ggml
 * allocates no buffer of 0 bytes. */
static size_t buft_get_alloc_size(abi_buft *buft, const abi_tensor *tensor)
{
    const struct offload *o = of_buft(buft);
    const size_t plain = kvp_buft_tensor_bytes(o->inner_buft, tensor);

    if (tensor->view_src == NULL && kvp_kv_is_cache_tensor(tensor))
        return kvp_buffer_request(tensor, kvp_buft_padded(o->inner_buft, plain)) > 0 ? 1 : plain;
    kvp_requests_note(tensor, plain);
    kvp_requests_reset(); /* a cache that was only planned may have come before */
    return plain;
}

static abi_buffer *buft_alloc_buffer(abi_buft *buft, size_t size)
{
    struct offload *o = of_buft(buft);
    size_t plain;
    abi_buffer *cache = kvp_buffer_alloc((abi_buft *)&o->label, kvp_requests_cache(), size, &plain);

    return plain > 0 ? kvp_buft_new_buffer(o->inner_buft, plain) : cache;
}

/* Devices */

static abi_buft *device_get_buffer_type(abi_device *device)
{
    return (abi_buft *)&of_device(device)->buft;
}

static const char *device_get_description(abi_device *device)
{
    return of_device(device)->description;
}

static const char *id_of(abi_device *device, const abi_device_props *props)
{
    return props->device_id != NULL ? props->device_id : device->iface.get_name(device);
}

/* Without an id, llama.cpp would use KVANT next to the device. */
static void device_get_props(abi_device *device, abi_device_props *props)
{
    of_device(device)->inner.get_props(device, props);
    props->description = of_device(device)->description;
    props->device_id = id_of(device, props);
}

static abi_backend *device_init_backend(abi_device *device, const char *params)
{
    return kvp_offload_backend(device, of_device(device)->inner.init_backend, params);
}

static bool device_supports_op(abi_device *device, const abi_tensor *op)
{
    return kvp_cache_tensor_of(op) != NULL ? kvp_cache_supports(op)
                                           : of_device(device)->inner.supports_op(device, op);
}

static bool device_supports_buft(abi_device *device, abi_buft *buft)
{
    struct offload *o = of_device(device);

    return buft == (abi_buft *)&o->buft || buft == (abi_buft *)&o->label ||
           o->inner.supports_buft(device, buft);
}

/* llama.cpp looks up how to set the number of threads, which these GPUs' registries do not know. */
static void *reg_get_proc_address(abi_reg *reg, const char *name)
{
    void (*set_n_threads)(abi_backend *, int) = kvp_offload_set_n_threads;
    void *address = NULL;
    size_t i = 0;

    if (strcmp(name, "ggml_backend_set_n_threads") == 0) {
        memcpy(&address, &set_n_threads, sizeof(address));
        return address;
    }
    while (offloads[i].device->reg != reg)
        i++;
    return offloads[i].get_proc_address != NULL ? offloads[i].get_proc_address(reg, name) : NULL;
}

static void take_over(struct offload *o, abi_device *device)
{
    o->device = device;
    o->inner = device->iface;
    o->inner_buft = device->iface.get_buffer_type(device);
    /* `kvant exec` reads it in the program's list of devices */
    snprintf(o->description, sizeof(o->description), "%s [kvant%s]",
             device->iface.get_description(device),
             device->iface.get_type(device) == ABI_DEVICE_IGPU ? ", integrated" : "");
    kvp_buft_derive(&o->buft, o->inner_buft, buft_alloc_buffer, buft_get_alloc_size);
    kvp_buft_label(&o->label);
    n_offloads++;
    device->iface.get_description = device_get_description;
    device->iface.get_buffer_type = device_get_buffer_type;
    device->iface.get_props = device_get_props;
    device->iface.init_backend = device_init_backend;
    device->iface.supports_op = device_supports_op;
    device->iface.supports_buft = device_supports_buft;
    o->get_proc_address = device->reg->iface.get_proc_address;
    if (o->get_proc_address != reg_get_proc_address)
        device->reg->iface.get_proc_address = reg_get_proc_address;
    kvp_note("caches of %s are in the computer's memory", device->iface.get_name(device));
}

static bool is_gpu(abi_device *device, int32_t type)
{
    const char *reg = device->reg != NULL ? device->reg->iface.get_name(device->reg) : "RPC";

    return device->iface.get_type(device) == type && strcmp(reg, "RPC") != 0 &&
           strcmp(reg, "KVANT") != 0;
}

size_t kvp_offload_setup(void)
{
    static const int32_t types[] = { ABI_DEVICE_GPU, ABI_DEVICE_IGPU };
    abi_device_props props = { 0 };

    if (kvp_api.dev_count == NULL || kvp_api.dev_get == NULL)
        return 0;
    for (size_t t = 0; t < 2; t++)
        for (size_t i = 0; i < kvp_api.dev_count() && n_offloads < MAX_OFFLOADS; i++)
            if (is_gpu(kvp_api.dev_get(i), types[t]))
                take_over(&offloads[n_offloads], kvp_api.dev_get(i));
    if (n_offloads > 0) {
        abi_device *first = offloads[0].device;
        first->iface.get_props(first, &props);
        kvp_device_hide_behind(props.device_id, first->iface.get_type(first));
    }
    return n_offloads;
}
