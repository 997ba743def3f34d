#define _POSIX_C_SOURCE 200809L /* recursive mutexes */
/* devices.c - devices and buffer types of gpu.h, derived from CUDA's.
 *
 * A device keeps CUDA's context, so CUDA's own functions work on it unchanged. Buffers without a
 * cache are CUDA's buffers with CUDA's label, because ggml-cuda's asynchronous copies require this
 * label. */
#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../buffer_requests.h"
#include "../buffer.h"
#include "../ggml_api.h"
#include "../log.h"

static kvp_gpu gpus[KVP_MAX_GPUS];
static size_t n_gpus;
static abi_reg *inner_reg;

/* Memory */

bool kvp_gpu_enter(const kvp_gpu *gpu)
{
    return kvp_cu_ok(kvp_cu.context_set(gpu->context), "entering its context");
}

static atomic_size_t held; /* bytes that kvp_gpu_grow holds, on all GPUs */

size_t kvp_gpu_held(void)
{
    return atomic_load(&held);
}

/* The largest memory that grows by at least half at a time. With that growth, all former sizes
 * together are less than two times the last one. Larger memory belongs to back ends, which free
 * former sizes, and half as much again might not be free. */
#define MOST_GROWN ((size_t)64 << 20)

static size_t grown(const kvp_gpu_memory *memory, size_t bytes)
{
    const size_t more = memory->bytes + memory->bytes / 2;

    return bytes > more || more > MOST_GROWN ? bytes : more;
}

bool kvp_gpu_grow(kvp_gpu *gpu, kvp_gpu_memory *memory, size_t bytes, bool zero)
{
    kvp_gpu_memory *former = NULL;
    cu_address at = 0;

    if (bytes <= memory->bytes)
        return true;
    bytes = grown(memory, bytes);
    if (memory->at != NULL) {
        former = malloc(sizeof(*former));
        if (former == NULL)
            return false;
        *former = *memory;
    }
    if (!kvp_gpu_enter(gpu) || !kvp_cu_ok(kvp_cu.memory_new(&at, bytes), "allocating memory")) {
        free(former);
        return false;
    }
    atomic_fetch_add(&held, bytes);
    *memory = (kvp_gpu_memory){ (void *)(uintptr_t)at, bytes, former };
    return !zero || (kvp_cu_ok(kvp_cu.fill(at, 0, bytes, gpu->stream), "clearing memory") &&
                     kvp_cu_finish(gpu->stream, "clearing memory"));
}

static void free_memory(const kvp_gpu_memory *memory)
{
    kvp_cu.memory_free((cu_address)(uintptr_t)memory->at);
    atomic_fetch_sub(&held, memory->bytes);
}

void kvp_gpu_release_former(kvp_gpu_memory *memory)
{
    for (kvp_gpu_memory *former = memory->former, *next; former != NULL; former = next) {
        next = former->former;
        free_memory(former);
        free(former);
    }
    memory->former = NULL;
}

void kvp_gpu_release(kvp_gpu_memory *memory)
{
    kvp_gpu_release_former(memory);
    if (memory->at != NULL)
        free_memory(memory);
    *memory = (kvp_gpu_memory){ 0 };
}

atomic_uint *kvp_gpu_new_word(void)
{
    void *word = NULL;

    if (!kvp_cu_ok(kvp_cu.host_memory_new(&word, sizeof(atomic_uint), CU_HOST_PORTABLE_MAPPED),
                   "allocating host memory"))
        return NULL;
    atomic_init((atomic_uint *)word, 0);
    return word;
}

kvant_status kvp_gpu_read_word(atomic_uint *word)
{
    const unsigned bits =
        atomic_load_explicit(word, memory_order_relaxed) != 0 ? atomic_exchange(word, 0) : 0;

    if (bits == 0)
        return KVANT_OK;
    return bits & KVANT_CUDA_ROW_NONFINITE ? KVANT_ERR_NONFINITE : KVANT_ERR_RANGE;
}

/* Buffer types */

static kvp_gpu *gpu_of_buft(const abi_buft *buft)
{
    return kvp_gpu_of(kvp_api.api == 2 ? ((const abi_buft_2 *)buft)->device
                                       : ((const abi_buft_3 *)buft)->device);
}

static const char *buft_get_name(abi_buft *buft)
{
    return gpu_of_buft(buft)->name;
}

static bool is_cache(const abi_tensor *tensor)
{
    return tensor->view_src == NULL && kvp_kv_is_cache_tensor(tensor);
}

static size_t buft_get_alloc_size(abi_buft *buft, const abi_tensor *tensor)
{
    kvp_gpu *gpu = gpu_of_buft(buft);
    const size_t bytes = kvp_buft_tensor_bytes(gpu->inner_buft, tensor);

    if (tensor->ne[0] == 0)
        return bytes;
    if (kvp_requests_note(tensor, kvp_buft_padded(gpu->inner_buft, bytes)))
        return kvp_buffer_bytes(tensor, true);
    kvp_requests_reset(); /* this was a planned cache; a model's weights come next */
    return bytes + kvp_gpu_room(gpu, tensor);
}

/* The room that a tensor of the context that this thread creates shares with other tensors: rows
 * that get another transform, and staging pages. */
static void find_room(const abi_tensor *tensor, size_t *learning, size_t *staging)
{
    const kvp_settings *settings = kvp_kv_current_settings();
    char err[512];
    kvp_kv_shape shape;
    size_t room;

    if (settings == NULL || !kvp_kv_shape_read(tensor, true, &shape, err, sizeof(err)))
        return;
    room = kvp_gpu_learning_room(&shape, settings);
    *learning = room > *learning ? room : *learning;
    room = kvp_gpu_staging_room(&shape, settings);
    *staging = room > *staging ? room : *staging;
}

/* The bytes of all tensors of a buffer that is only planned (--fit), and the room that they use one
 * after another. */
static size_t buft_get_alloc_size_n(abi_buft *buft, abi_tensor **tensors, int n_tensors)
{
    const kvp_gpu *gpu = gpu_of_buft(buft);
    bool values = false;
    size_t bytes = 0, learning = 0, staging = 0;

    for (int i = 0; i < n_tensors; i++)
        values = values || (is_cache(tensors[i]) && tensors[i]->name[6] == 'v');
    for (int i = 0; i < n_tensors; i++)
        if (tensors[i]->data == NULL && tensors[i]->view_src == NULL)
            bytes += kvp_buft_padded(gpu->inner_buft,
                                     values && is_cache(tensors[i])
                                         ? kvp_buffer_bytes(tensors[i], true)
                                         : kvp_buft_tensor_bytes(gpu->inner_buft, tensors[i]));
    for (int i = 0; i < n_tensors && values; i++)
        if (is_cache(tensors[i]))
            find_room(tensors[i], &learning, &staging);
    return bytes + learning + staging;
}

/* The size for a tensor in a buffer that exists. */
static size_t label_get_alloc_size(abi_buft *buft, const abi_tensor *tensor)
{
    return is_cache(tensor) ? kvp_buffer_bytes(tensor, true)
                            : kvp_buft_tensor_bytes(gpu_of_buft(buft)->inner_buft, tensor);
}

/* Inputs on their way to the GPU */

static bool keep(kvp_gpu_input_copy *seen, const abi_tensor *tensor, const void *data, size_t size)
{
    if (seen->bytes < size) {
        void *copy = realloc(seen->copy, size);
        seen->bytes = copy != NULL ? size : 0;
        if (copy == NULL)
            return false;
        seen->copy = copy;
    }
    memcpy(seen->copy, data, size);
    seen->at = tensor->data;
    seen->bytes = size;
    return true;
}

/* The entry for this address, or a new one. */
static kvp_gpu_input_copy *entry_of(kvp_gpu *gpu, const void *at)
{
    kvp_gpu_input_copy *seen = gpu->seen;

    while (seen != NULL && seen->at != at)
        seen = seen->next;
    if (seen == NULL && (seen = calloc(1, sizeof(*seen))) != NULL) {
        seen->next = gpu->seen;
        gpu->seen = seen;
    }
    return seen;
}

void kvp_gpu_forget_inputs(kvp_gpu *gpu)
{
    pthread_mutex_lock(&gpu->lock);
    for (kvp_gpu_input_copy *seen = gpu->seen, *next; seen != NULL; seen = next) {
        next = seen->next;
        free(seen->copy);
        free(seen);
    }
    gpu->seen = NULL;
    pthread_mutex_unlock(&gpu->lock);
}

/* The largest input that is kept. Inputs of whole numbers are kept under any name, because graphs
 * say which of them are cells and positions. Larger tensors are a model's weights: no batch has a
 * million tokens. */
#define MOST_INPUT ((size_t)8 << 20)

static bool is_numbers(const abi_tensor *tensor, size_t size)
{
    return (tensor->type == ABI_TYPE_I64 || tensor->type == ABI_TYPE_I32) && size <= MOST_INPUT;
}

static void note_input(kvp_gpu *gpu, const abi_tensor *tensor, const void *data, size_t size)
{
    const bool numbers = is_numbers(tensor, size);
    kvp_gpu_input_copy *seen = numbers ? entry_of(gpu, tensor->data) : NULL;

    if (tensor->type == ABI_TYPE_F16 && strstr(tensor->name, "kq_mask") != NULL)
        kvp_gpu_note_mask(gpu, tensor, data, size);
    if (numbers && (seen == NULL || !keep(seen, tensor, data, size)))
        gpu->lost_input = true;
}

static void set_tensor(abi_buffer *buffer, abi_tensor *tensor, const void *data, size_t offset,
                       size_t size)
{
    void (*inner)(abi_buffer *, abi_tensor *, const void *, size_t, size_t) = NULL;

    for (size_t i = 0; i < n_gpus; i++) {
        if (buffer->buft != gpus[i].inner_buft)
            continue;
        pthread_mutex_lock(&gpus[i].lock);
        if (offset == 0)
            note_input(&gpus[i], tensor, data, size);
        inner = gpus[i].set_tensor != NULL ? gpus[i].set_tensor : inner;
        pthread_mutex_unlock(&gpus[i].lock);
    }
    inner(buffer, tensor, data, offset, size);
}

/* The entry for this address; NULL when nothing was written there. */
static const kvp_gpu_input_copy *seen_at(const kvp_gpu *gpu, const void *at)
{
    const kvp_gpu_input_copy *seen = gpu->seen;

    while (seen != NULL && seen->at != at)
        seen = seen->next;
    return seen;
}

/* Finds the cells and positions of a batch. A token may have several positions (M-RoPE); the first
 * positions of all tokens come first in memory. */
bool kvp_gpu_find_step(kvp_gpu *gpu, const void *cells, const void *positions, size_t n,
                       kvp_gpu_step *step)
{
    const kvp_gpu_input_copy *seen = seen_at(gpu, cells);
    const kvp_gpu_input_copy *at = positions != NULL ? seen_at(gpu, positions) : NULL;

    if (seen == NULL || seen->bytes != n * sizeof(int64_t))
        return false;
    *step = (kvp_gpu_step){ seen->copy, NULL, n };
    if (at != NULL && at->bytes >= n * sizeof(int32_t))
        step->positions = at->copy;
    return true;
}

const int32_t *kvp_gpu_positions_at(const kvp_gpu *gpu, const void *at, size_t n)
{
    const kvp_gpu_input_copy *seen = at != NULL ? seen_at(gpu, at) : NULL;

    return seen != NULL && seen->bytes >= n * sizeof(int32_t) ? seen->copy : NULL;
}

/* Allocates a buffer of CUDA's with CUDA's label. */
static abi_buffer *plain_buffer(kvp_gpu *gpu, size_t size)
{
    abi_buffer *inner = kvp_buft_new_buffer(gpu->inner_buft, size);

    if (inner == NULL)
        return NULL;
    pthread_mutex_lock(&gpu->lock);
    gpu->set_tensor = inner->iface.set_tensor;
    pthread_mutex_unlock(&gpu->lock);
    return inner;
}

static abi_buffer *buft_alloc_buffer(abi_buft *buft, size_t size)
{
    kvp_gpu *gpu = gpu_of_buft(buft);
    size_t keys;
    const kvp_buffer_kind what = kvp_requests_finish(&keys);
    const bool cache = what == KVP_BUFFER_CACHE;
    abi_buffer *inner;

    if ((cache && kvp_buffer_refused(size)) || (!cache && kvp_kv_refused()))
        return NULL;
    if (what == KVP_BUFFER_KEYS)
        kvp_kv_note_keys_only();
    if (!cache)
        kvp_kv_graph_is_sized();
    inner = plain_buffer(gpu, what == KVP_BUFFER_KEYS ? keys : size);
    if (inner != NULL && cache) {
        inner->iface.clear(inner, 0);
        return kvp_buffer_around((abi_buft *)&gpu->kv_buft, &gpu->remote, inner);
    }
    if (inner != NULL)
        inner->iface.set_tensor = set_tensor; /* replaced for this buffer only */
    return inner;
}

static void derive_buft(abi_any_buft *buft, kvp_gpu *gpu,
                        size_t (*get_alloc_size)(abi_buft *, const abi_tensor *))
{
    kvp_buft_derive(buft, gpu->inner_buft, buft_alloc_buffer, get_alloc_size);
    if (kvp_api.api == 2) {
        buft->v2.device = &gpu->device;
        buft->v2.iface.get_name = buft_get_name;
    } else {
        buft->v3.device = &gpu->device;
        buft->v3.iface.get_name = buft_get_name;
        buft->v3.iface.get_alloc_size_n = buft_get_alloc_size_n;
    }
}

/* Devices */

static const char *device_get_name(abi_device *device)
{
    return kvp_gpu_of(device)->name;
}

static void device_get_props(abi_device *device, abi_device_props *props)
{
    kvp_gpu *gpu = kvp_gpu_of(device);

    /* The device has the same device_id as CUDA's. When two devices share one, llama.cpp takes the
     * first, unless --device names the second. */
    gpu->inner->iface.get_props(gpu->inner, props);
    props->name = gpu->name;
}

static abi_buft *device_get_buffer_type(abi_device *device)
{
    return kvp_gpu_accel() ? kvp_gpu_of(device)->inner_buft : (abi_buft *)&kvp_gpu_of(device)->buft;
}

static bool device_supports_op(abi_device *device, const abi_tensor *node)
{
    kvp_gpu *gpu = kvp_gpu_of(device);

    return kvp_cache_tensor_of(node) != NULL ? kvp_gpu_supports(gpu, node)
                                             : gpu->inner->iface.supports_op(gpu->inner, node);
}

static bool device_supports_buft(abi_device *device, abi_buft *buft)
{
    kvp_gpu *gpu = kvp_gpu_of(device);

    return buft == (abi_buft *)&gpu->buft || buft == (abi_buft *)&gpu->kv_buft ||
           gpu->inner->iface.supports_buft(gpu->inner, buft);
}

static void derive_device(kvp_gpu *gpu, abi_reg *reg)
{
    gpu->device = *gpu->inner;
    gpu->device.reg = reg;
    gpu->device.iface.get_name = device_get_name;
    gpu->device.iface.get_props = device_get_props;
    gpu->device.iface.init_backend = kvp_gpu_init_backend;
    gpu->device.iface.get_buffer_type = device_get_buffer_type;
    gpu->device.iface.supports_op = device_supports_op;
    gpu->device.iface.supports_buft = device_supports_buft;
    derive_buft(&gpu->buft, gpu, buft_get_alloc_size);
    derive_buft(&gpu->kv_buft, gpu, label_get_alloc_size);
}

static bool setup_one(kvp_gpu *gpu, abi_device *inner, const char *name, char *err, size_t errlen)
{
    abi_device_props props = { 0 };
    pthread_mutexattr_t recursive;
    char bus[32] = "";
    int number = 0;

    inner->iface.get_props(inner, &props);
    if (props.device_id != NULL) /* GGML_CUDA_DEVICES adds a "-v1" */
        snprintf(bus, sizeof(bus), "%.*s", (int)strcspn(props.device_id, "-"), props.device_id);
    gpu->inner = inner;
    gpu->inner_buft = inner->iface.get_buffer_type(inner);
    gpu->remote = kvp_gpu_remote;
    gpu->remote.gpu = gpu;
    snprintf(gpu->name, sizeof(gpu->name), "%s", name);
    pthread_mutexattr_init(&recursive);
    pthread_mutexattr_settype(&recursive, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&gpu->lock, &recursive);
    pthread_mutex_init(&gpu->list_lock, NULL);
    pthread_mutexattr_destroy(&recursive);
    if (kvp_cu.device_by_bus_id(&number, bus) != 0 ||
        kvp_cu.context_retain(&gpu->context, number) != 0 ||
        kvp_cu.context_set(gpu->context) != 0 ||
        kvp_cu.stream_new(&gpu->stream, CU_NON_BLOCKING) != 0 ||
        (gpu->refused = kvp_gpu_new_word()) == NULL ||
        (gpu->refused_later = kvp_gpu_new_word()) == NULL ||
        (gpu->unsealed = kvp_gpu_new_word()) == NULL) {
        snprintf(err, errlen, "the driver does not open the GPU %s",
                 props.device_id != NULL ? props.device_id : "?");
        return false;
    }
    return true;
}

size_t kvp_gpu_setup(abi_reg *reg, char *err, size_t errlen)
{
    size_t n;

    err[0] = '\0';
    inner_reg = kvp_api.reg_by_name != NULL ? kvp_api.reg_by_name("CUDA") : NULL;
    if (inner_reg == NULL || inner_reg->iface.get_device_count(inner_reg) == 0)
        return 0;
    if (!kvp_driver_load(err, errlen) || kvant_cuda_available(err, errlen) != KVANT_OK)
        return 0;
    n = inner_reg->iface.get_device_count(inner_reg);
    for (size_t i = 0; i <= n && i < KVP_MAX_GPUS; i++) {
        abi_device *inner = inner_reg->iface.get_device(inner_reg, i < n ? i : 0);
        /* after all GPUs, the first GPU a second time, under the name of the device in the
         * computer's memory */
        char name[sizeof(gpus[i].name)] = "KVANT";
        if (i < n)
            snprintf(name, sizeof(name), "KVANT%u", (unsigned)i % 1000);
        if (!setup_one(&gpus[i], inner, name, err, errlen))
            return n_gpus = 0;
        derive_device(&gpus[i], reg);
        n_gpus++;
        kvp_note("%s is %s", gpus[i].name, inner->iface.get_name(inner));
    }
    return n_gpus;
}

abi_device *kvp_gpu_device(size_t index)
{
    return index < n_gpus ? &gpus[index].device : NULL;
}

abi_reg *kvp_gpu_inner_reg(void)
{
    return inner_reg;
}
