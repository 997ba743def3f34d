/* buffer.c - see buffer.h. */
#include "buffer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "buffer_region.h"
#include "buffer_requests.h"
#include "cpu_graph.h"
#include "cpu_rows.h"
#include "ggml_api.h"
#include "host.h"
#include "kv_steps.h"
#include "llama_states.h"
#include "log.h"
#include "trace.h"

/* The size of a tensor that cannot be served. While ggml adds up sizes it cannot be told of a
 * failure, but it handles an allocation that fails. This size exceeds any address space, and sums
 * of a thousand of them do not overflow. */
#define REFUSED ((size_t)1 << 54)

static abi_any_buft buft;
static abi_buft *others[64];
static size_t n_others;

/* The reason why the last tensor was refused. It is printed when the allocation fails: once per
 * cache, not once per tensor. */
static _Thread_local char refusal[768];

void kvp_buft_add(abi_buft *added)
{
    if (n_others < sizeof(others) / sizeof(others[0]))
        others[n_others++] = added;
}

bool kvp_is_ours(const abi_buft *of)
{
    bool ours = of == kvp_buft();

    for (size_t i = 0; i < n_others; i++)
        ours = ours || of == others[i];
    return ours;
}

bool kvp_is_kv(const abi_tensor *tensor)
{
    const abi_tensor *root = kvp_root(tensor);

    /* only a cache tensor gets something extra in a buffer of ours */
    return root->buffer != NULL && kvp_is_ours(root->buffer->buft) &&
           (root->extra != NULL || kvp_kv_is_cache_tensor(root));
}

const abi_tensor *kvp_cache_tensor_of(const abi_tensor *node)
{
    if (kvp_is_kv(node))
        return node;
    for (int i = 0; i < ABI_MAX_SRC; i++)
        if (node->src[i] != NULL && kvp_is_kv(node->src[i]))
            return node->src[i];
    return NULL;
}

kvp_kv *kvp_kv_of(const abi_tensor *tensor)
{
    return kvp_is_kv(tensor) ? kvp_root(tensor)->extra : NULL;
}

/* The offset of a tensor's byte in the nominal cache tensor. */
static size_t nominal_offset(const abi_tensor *tensor, size_t offset)
{
    return tensor->view_offs + offset;
}

/* Buffer */

static void buffer_free(abi_buffer *buffer)
{
    kvp_region_free(buffer->context);
}

static void *buffer_get_base(abi_buffer *buffer)
{
    return ((kvp_region *)buffer->context)->base;
}

/* Gives a tensor the placement of its buffer, since all tensors of one cache have the same
 * cells. */
static bool share_placement(kvp_region *region, kvp_kv *kv)
{
    if (kv->shape.n_streams != 1 || kv->shape.in_order)
        return true;
    if (region->placement == NULL) {
        region->placement = kvp_placement_create(kv->shape.n_cells);
        region->n_placed = kv->shape.n_cells;
    }
    if (region->placement != NULL && region->n_placed != kv->shape.n_cells) {
        kvp_error("%s has %u cells, but other tensors of its buffer have %u; leave out --device "
                  "KVANT, and report the model",
                  kv->name, kv->shape.n_cells, region->n_placed);
        return false;
    }
    return region->placement != NULL && kvp_kv_set_placement(kv, region->placement);
}

/* A cache tensor gets its cells here; views and other tensors need nothing. */
static int32_t buffer_init_tensor(abi_buffer *buffer, abi_tensor *tensor)
{
    kvp_region *region = buffer->context;
    char err[512] = "";
    kvp_kv_shape shape;
    size_t reserved = 0;
    kvp_kv *kv;

    if (!kvp_is_ours(buffer->buft) || tensor->view_src != NULL)
        return ABI_STATUS_SUCCESS;
    if (!kvp_kv_is_cache_tensor(tensor))
        return region->inner != NULL || kvp_host_commit(tensor->data, kvp_api.nbytes(tensor))
                   ? ABI_STATUS_SUCCESS
                   : ABI_STATUS_ALLOC_FAILED;
    kvp_requests_placed(); /* ggml asks for the size once more before it places a tensor */
    if (kvp_kv_shape_read(tensor, region->remote != NULL || region->latents, &shape, err,
                          sizeof(err))) {
        shape.latents = region->latents;
        reserved = kvp_kv_reserve(&shape, err, sizeof(err));
    }
    if (reserved != 0 && !kvp_region_is_free(region, tensor->data, reserved)) {
        snprintf(err, sizeof(err), "its %zu bytes do not fit at the address that ggml chose",
                 reserved);
        reserved = 0;
    }
    if (reserved == 0) {
        kvp_error("%s: %s", tensor->name, err);
        return ABI_STATUS_ALLOC_FAILED;
    }
    kv = kvp_kv_create(tensor->name, &shape, tensor->data, reserved);
    if (kv == NULL || !share_placement(region, kv) || !kvp_region_add(region, kv)) {
        kvp_kv_free(kv);
        return ABI_STATUS_ALLOC_FAILED;
    }
    kv->remote = region->remote;
    kv->cache = region;
    if (region->remote == NULL)
        kvp_steps_join(&region->steps[shape.role], kv);
    tensor->extra = kv;
    return ABI_STATUS_SUCCESS;
}

static void buffer_set_tensor(abi_buffer *buffer, abi_tensor *tensor, const void *data,
                              size_t offset, size_t size)
{
    abi_buffer *inner = ((kvp_region *)buffer->context)->inner;
    kvp_kv *kv = kvp_kv_of(tensor);

    if (kv != NULL)
        kvp_kv_write(kv, nominal_offset(tensor, offset), size, data);
    else if (inner != NULL)
        inner->iface.set_tensor(inner, tensor, data, offset, size);
    else
        memcpy((char *)tensor->data + offset, data, size);
}

static void buffer_get_tensor(abi_buffer *buffer, const abi_tensor *tensor, void *data,
                              size_t offset, size_t size)
{
    abi_buffer *inner = ((kvp_region *)buffer->context)->inner;
    kvp_kv *kv = kvp_kv_of(tensor);

    if (kv == NULL && inner != NULL)
        inner->iface.get_tensor(inner, tensor, data, offset, size);
    else if (kv == NULL)
        memcpy(data, (const char *)tensor->data + offset, size);
    /* NaN, so that nobody reads stale bytes, or zeros that attention would take for rows */
    else if (!kvp_kv_read(kv, nominal_offset(tensor, offset), size, data))
        memset(data, 0xff, size);
}

/* With -sm tensor each device has a part of every row, and llama.cpp saves and restores a state by
 * pieces that are rows here. They are transferred together, because a row alone takes a GPU as long
 * as hundreds of rows. Their bytes are nominal: codes of a part would fit no other split. */

/* Memory for the pieces, if they are rows that follow each other. */
static char *room_for_pieces(const kvp_kv *kv, size_t size, size_t n, size_t stride)
{
    return kv != NULL && n > 1 && size > 0 && size == stride && n <= SIZE_MAX / size
               ? malloc(n * size)
               : NULL;
}

static void buffer_set_tensor_2d(abi_buffer *buffer, abi_tensor *tensor, const void *data,
                                 size_t offset, size_t size, size_t n, size_t tensor_stride,
                                 size_t data_stride)
{
    abi_buffer *inner = ((kvp_region *)buffer->context)->inner;
    kvp_kv *kv = kvp_kv_of(tensor);
    char *rows = room_for_pieces(kv, size, n, tensor_stride);

    /* pieces of a damaged state are refused one by one */
    if (rows != NULL && kvp_restoring_wait(data, (n - 1) * data_stride + size, false) == data) {
        for (size_t i = 0; i < n; i++)
            memcpy(rows + i * size, (const char *)data + i * data_stride, size);
        kvp_kv_write(kv, nominal_offset(tensor, offset), n * size, rows);
    } else if (kv == NULL && inner != NULL && inner->iface.set_tensor_2d != NULL) {
        inner->iface.set_tensor_2d(inner, tensor, data, offset, size, n, tensor_stride,
                                   data_stride);
    } else {
        for (size_t i = 0; i < n; i++)
            buffer_set_tensor(buffer, tensor, (const char *)data + i * data_stride,
                              offset + i * tensor_stride, size);
    }
    free(rows);
}

static void buffer_get_tensor_2d(abi_buffer *buffer, const abi_tensor *tensor, void *data,
                                 size_t offset, size_t size, size_t n, size_t tensor_stride,
                                 size_t data_stride)
{
    abi_buffer *inner = ((kvp_region *)buffer->context)->inner;
    kvp_kv *kv = kvp_kv_of(tensor);
    char *rows = room_for_pieces(kv, size, n, tensor_stride);

    if (rows != NULL && kvp_kv_read_nominal(kv, nominal_offset(tensor, offset), n * size, rows)) {
        for (size_t i = 0; i < n; i++)
            memcpy((char *)data + i * data_stride, rows + i * size, size);
    } else if (kv == NULL && inner != NULL && inner->iface.get_tensor_2d != NULL) {
        inner->iface.get_tensor_2d(inner, tensor, data, offset, size, n, tensor_stride,
                                   data_stride);
    } else {
        for (size_t i = 0; i < n; i++)
            buffer_get_tensor(buffer, tensor, (char *)data + i * data_stride,
                              offset + i * tensor_stride, size);
    }
    free(rows);
}

static void buffer_memset_tensor(abi_buffer *buffer, abi_tensor *tensor, uint8_t value,
                                 size_t offset, size_t size)
{
    abi_buffer *inner = ((kvp_region *)buffer->context)->inner;
    kvp_kv *kv = kvp_kv_of(tensor);

    if (kv != NULL)
        kvp_kv_fill(kv, nominal_offset(tensor, offset), size, value);
    else if (inner != NULL)
        inner->iface.memset_tensor(inner, tensor, value, offset, size);
    else
        memset((char *)tensor->data + offset, value, size);
}

/* Copies whole streams between equal caches, for llama_memory_seq_cp. */
static bool copy_streams(const abi_tensor *src, const kvp_kv *from, const abi_tensor *dst,
                         kvp_kv *to)
{
    size_t stream = kvp_kv_stream_bytes(from), size = kvp_api.nbytes(src);
    size_t first_from = src->view_offs / stream, first_to = dst->view_offs / stream;

    if (stream != kvp_kv_stream_bytes(to) || size % stream != 0 || size != kvp_api.nbytes(dst) ||
        src->view_offs % stream != 0 || dst->view_offs % stream != 0)
        return false;
    for (size_t i = 0; i < size / stream; i++)
        if (!kvp_kv_copy_stream(from, (uint32_t)(first_from + i), to, (uint32_t)(first_to + i)))
            return false;
    return true;
}

/* Copies to dst, which lies here, from src, which lies anywhere. ggml carries out a copy that this
 * function declines through get_tensor and set_tensor. */
static bool buffer_cpy_tensor(abi_buffer *buffer, const abi_tensor *src, abi_tensor *dst)
{
    const kvp_kv *from = kvp_kv_of(src);
    kvp_kv *to = kvp_kv_of(dst);

    (void)buffer;
    return from != NULL && to != NULL && copy_streams(src, from, dst, to);
}

static void buffer_clear(abi_buffer *buffer, uint8_t value)
{
    kvp_region *region = buffer->context;

    if (!kvp_is_ours(buffer->buft)) {
        memset(region->base, value, region->size);
        return;
    }
    if (value != 0)
        kvp_error("llama.cpp wanted to set the cache to %d, but a compressed cache can only be "
                  "cleared; it is cleared",
                  value);
    if (kvp_trace_is_on)
        kvp_trace_clear(region);
    kvp_cpu_rows_forget(region);
    if (region->placement != NULL)
        kvp_placement_clear(region->placement);
    for (size_t i = 0; i < region->n_tensors; i++)
        kvp_kv_clear(region->tensors[i]);
    if (region->inner != NULL)
        region->inner->iface.clear(region->inner, 0);
}

/* Buffer type */

static const char *buft_get_name(abi_buft *self)
{
    (void)self;
    return "KVANT";
}

/* Creates a buffer. inner is NULL, or is freed when there is no memory. With the label of the CPU's
 * memory it is plain memory, on which the CPU back end computes by itself. */
static abi_buffer *buffer_create(abi_buft *of, const kvp_remote *remote, abi_buffer *inner,
                                 size_t size)
{
    static const abi_buffer_iface iface = {
        .free_buffer = buffer_free,
        .get_base = buffer_get_base,
        .init_tensor = buffer_init_tensor,
        .memset_tensor = buffer_memset_tensor,
        .set_tensor = buffer_set_tensor,
        .get_tensor = buffer_get_tensor,
        .set_tensor_2d = buffer_set_tensor_2d,
        .get_tensor_2d = buffer_get_tensor_2d,
        .cpy_tensor = buffer_cpy_tensor,
        .clear = buffer_clear,
    };
    kvp_region *region = kvp_region_create(size, inner);

    if (region == NULL) {
        kvp_error("cannot reserve %zu bytes of address space for the cache; choose a smaller -c, "
                  "or raise ulimit -v",
                  size);
        if (inner != NULL)
            kvp_api.buffer_free(inner);
        return NULL;
    }
    /* Others write anywhere in plain memory. Cells are committed when they are made. */
    if (inner == NULL && !kvp_is_ours(of) && !kvp_host_commit(region->base, size)) {
        kvp_error("there is no memory for a buffer of %zu bytes; choose a smaller -c", size);
        kvp_region_free(region);
        return NULL;
    }
    region->remote = remote;
    kvp_note("buffer of %.2f MiB", (double)size / 1048576.0);
    return kvp_api.buffer_init(of, iface, region, size);
}

abi_buffer *kvp_buffer_around(abi_buft *of, const kvp_remote *remote, abi_buffer *inner)
{
    return buffer_create(of, remote, inner, inner->size);
}

bool kvp_buffer_refused(size_t size)
{
    if (size >= REFUSED)
        kvp_error("no KV cache: %s", refusal);
    return size >= REFUSED || kvp_kv_refused();
}

/* Bytes of a cache tensor as latents; 0 when it does not hold latents, or when they cannot be
 * compressed. */
static size_t latent_bytes(const abi_tensor *tensor)
{
    char err[sizeof(refusal)] = "";
    kvp_kv_shape shape;

    if (tensor->name[6] != 'k' || !kvp_mla_has_row((uint64_t)tensor->ne[0]) ||
        !kvp_kv_shape_read(tensor, true, &shape, err, sizeof(err)))
        return 0;
    shape.latents = true;
    return kvp_kv_reserve(&shape, err, sizeof(err));
}

static abi_buffer *create_latents(abi_buft *self, size_t size)
{
    abi_buffer *buffer = kvp_kv_refused() ? NULL : buffer_create(self, NULL, NULL, size);

    if (buffer != NULL)
        ((kvp_region *)buffer->context)->latents = true;
    return buffer;
}

abi_buffer *kvp_buffer_alloc(abi_buft *of, size_t cache, size_t other, size_t *plain)
{
    const size_t latents = kvp_requests_latents();
    size_t keys;
    const kvp_buffer_kind what = kvp_requests_finish(&keys);

    *plain = 0;
    if (what == KVP_BUFFER_CACHE)
        return kvp_buffer_refused(cache) ? NULL : buffer_create(of, NULL, NULL, cache);
    if (latents > 0)
        return create_latents(of, latents);
    if (kvp_kv_refused())
        return NULL;
    if (what == KVP_BUFFER_KEYS)
        kvp_kv_note_keys_only();
    *plain = what == KVP_BUFFER_KEYS ? keys : other;
    return NULL;
}

static abi_buffer *buft_alloc_buffer(abi_buft *self, size_t size)
{
    size_t plain;
    abi_buffer *buffer = kvp_buffer_alloc(self, size, size, &plain);

    return plain > 0 ? buffer_create(kvp_api.cpu_buffer_type(), NULL, NULL, plain) : buffer;
}

static size_t buft_get_alignment(abi_buft *self)
{
    (void)self;
    return KVANT_PAGE_ALIGN;
}

static size_t padded_to_page(size_t bytes)
{
    return (bytes + KVANT_PAGE_ALIGN - 1) / KVANT_PAGE_ALIGN * KVANT_PAGE_ALIGN;
}

/* Bytes of the memory that the tensors of a cache share. They are counted with the first of these
 * tensors. */
static size_t step_bytes(const abi_tensor *tensor)
{
    char err[sizeof(refusal)] = "";
    const kvp_settings *settings = kvp_kv_current_settings();
    kvp_kv_shape shape;

    if (!kvp_requests_begin_cache() || settings == NULL ||
        !kvp_kv_shape_read(tensor, false, &shape, err, sizeof(err)))
        return 0;
    return padded_to_page(kvp_steps_bytes(&shape, settings));
}

/* The bytes that a tensor reserves: enough for its cells, and on some systems also for its type. */
static size_t at_least_nominal(size_t cells, size_t nominal)
{
    return kvp_host_reserves_nominal_bytes() && cells < nominal ? nominal : cells;
}

/* Only when llama.cpp plans (--fit) does it ask for the size of keys without values after it built
 * the graph. All other tensors of keys without values get their memory by kvp_requests_finish. */
size_t kvp_buffer_request(const abi_tensor *tensor, size_t plain)
{
    const size_t nominal = kvp_api.nbytes(tensor);
    size_t latents, bytes;

    if (!kvp_requests_note(tensor, plain))
        return 0;
    latents = latent_bytes(tensor);
    if (latents > 0)
        latents = at_least_nominal(latents, nominal);
    if (latents > 0)
        kvp_requests_note_latents(padded_to_page(latents));
    if (latents > 0 && (kvp_kv_plans_keys_only() || kvp_requests_place_latents()))
        return latents;
    if (kvp_kv_plans_keys_only())
        return 0;
    bytes = at_least_nominal(kvp_buffer_bytes(tensor, false) + step_bytes(tensor), nominal);
    kvp_requests_note_cache(padded_to_page(bytes));
    return bytes;
}

static size_t buft_get_alloc_size(abi_buft *self, const abi_tensor *tensor)
{
    const size_t plain = kvp_api.nbytes(tensor);
    const size_t bytes = kvp_buffer_request(tensor, padded_to_page(plain));

    (void)self;
    kvp_cpu_graph_note_size(tensor);
    return bytes > 0 ? bytes : plain;
}

size_t kvp_buffer_bytes(const abi_tensor *tensor, bool in_order)
{
    char err[sizeof(refusal)] = "";
    kvp_kv_shape shape;
    size_t bytes = 0;

    if (kvp_kv_of(tensor) != NULL)
        return kvp_kv_of(tensor)->reserved;
    if (kvp_kv_shape_read(tensor, in_order, &shape, err, sizeof(err)))
        bytes = kvp_kv_reserve(&shape, err, sizeof(err));
    if (bytes == 0)
        memcpy(refusal, err, sizeof(err));
    return bytes != 0 ? bytes : REFUSED;
}

/* No: ggml does not know the layout of compressed cells, and other back ends must not read them. */
static bool buft_is_host(abi_buft *self)
{
    (void)self;
    return false;
}

void kvp_buft_setup(int api, abi_device *device)
{
    if (api == 2)
        buft.v2 = (abi_buft_2){
            .iface = { .get_name = buft_get_name,
                       .alloc_buffer = buft_alloc_buffer,
                       .get_alignment = buft_get_alignment,
                       .get_alloc_size = buft_get_alloc_size,
                       .is_host = buft_is_host },
            .device = device,
        };
    else
        buft.v3 = (abi_buft_3){
            .iface = { .get_name = buft_get_name,
                       .alloc_buffer = buft_alloc_buffer,
                       .get_alignment = buft_get_alignment,
                       .get_alloc_size = buft_get_alloc_size,
                       .is_host = buft_is_host },
            .device = device,
        };
}

size_t kvp_buft_tensor_bytes(abi_buft *of, const abi_tensor *tensor)
{
    return kvp_api.api == 2 ? ((abi_buft_2 *)of)->iface.get_alloc_size(of, tensor)
                            : ((abi_buft_3 *)of)->iface.get_alloc_size(of, tensor);
}

size_t kvp_buft_padded(abi_buft *of, size_t bytes)
{
    const size_t alignment = kvp_api.api == 2 ? ((abi_buft_2 *)of)->iface.get_alignment(of)
                                              : ((abi_buft_3 *)of)->iface.get_alignment(of);

    return (bytes + alignment - 1) / alignment * alignment;
}

abi_buffer *kvp_buft_new_buffer(abi_buft *of, size_t bytes)
{
    return kvp_api.api == 2 ? ((abi_buft_2 *)of)->iface.alloc_buffer(of, bytes)
                            : ((abi_buft_3 *)of)->iface.alloc_buffer(of, bytes);
}

void kvp_buft_derive(abi_any_buft *to, const abi_buft *from,
                     abi_buffer *(*alloc_buffer)(abi_buft *, size_t),
                     size_t (*get_alloc_size)(abi_buft *, const abi_tensor *))
{
    if (kvp_api.api == 2) {
        to->v2 = *(const abi_buft_2 *)from;
        to->v2.iface.alloc_buffer = alloc_buffer;
        to->v2.iface.get_alloc_size = get_alloc_size;
    } else {
        to->v3 = *(const abi_buft_3 *)from;
        to->v3.iface.alloc_buffer = alloc_buffer;
        to->v3.iface.get_alloc_size = get_alloc_size;
        to->v3.iface.alloc_buffer_n = NULL; /* then ggml asks for one size after another */
        to->v3.iface.get_alloc_size_n = NULL;
    }
    kvp_buft_add((abi_buft *)to);
}

void kvp_buft_label(abi_any_buft *label)
{
    *label = buft;
    kvp_buft_add((abi_buft *)label);
}

abi_buft *kvp_buft(void)
{
    return (abi_buft *)&buft;
}
