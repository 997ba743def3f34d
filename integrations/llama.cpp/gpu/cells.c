/* cells.c - a cache tensor in GPU memory: its codec, its calibration (kvp_remote of kv_tensor.h),
 * and functions that encode and decode its rows. rows.c reads and writes rows without a graph.
 *
 * The pages of a tensor lie block after block, and within a block kv head after kv head. Block i
 * has cells 64 i to 64 i + 63 of all streams. */
#include "gpu.h"
#include "in_place.h"
#include "restored.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <kvant/calibration.h>

#include "../buffer.h"

kvp_gpu_cells *kvp_gpu_cells_of(const abi_tensor *tensor)
{
    const kvp_kv *kv = kvp_kv_of(tensor);

    return kv != NULL && kv->remote != NULL ? kv->cells : NULL;
}

size_t kvp_gpu_width(const kvp_gpu_cells *cells)
{
    return (size_t)cells->n_kv_heads * cells->head_dim;
}

bool kvp_gpu_upload(kvp_gpu *gpu, void *to, const void *from, size_t bytes)
{
    return kvp_cu_write(to, from, bytes, gpu->stream) && kvp_cu_finish(gpu->stream, "copying");
}

/* Makes the array 0, 1, 2, ... on the GPU. */
static bool count_to(kvp_gpu *gpu, uint32_t n)
{
    const size_t bytes = n * sizeof(int32_t);
    int32_t *numbers;
    bool ok;

    if (bytes <= gpu->numbers.bytes)
        return true;
    numbers = malloc(bytes);
    for (uint32_t i = 0; numbers != NULL && i < n; i++)
        numbers[i] = (int32_t)i;
    ok = numbers != NULL && kvp_gpu_grow(gpu, &gpu->numbers, bytes, false) &&
         kvp_gpu_upload(gpu, gpu->numbers.at, numbers, bytes);
    free(numbers);
    return ok;
}

const int32_t *kvp_gpu_iota(const kvp_gpu *gpu)
{
    return gpu->numbers.at;
}

/* Creating */

kvant_cuda_tables kvp_gpu_tables(const kvant_codec *source)
{
    kvant_cuda_tables tables = { .size = sizeof(tables) };

    kvant_cuda_codec_tables(source, &tables);
    return tables;
}

/* Returns the reason why these codecs are not served, or NULL. */
static const char *refusal_of(const kvp_kv *kv, const kvant_codec *const *codecs, uint32_t n)
{
    kvant_codec_info first = { .size = sizeof(first) }, info = { .size = sizeof(info) };
    kvant_scheme_info scheme = { .size = sizeof(scheme) };
    kvant_calibration_entry entry = { .size = sizeof(entry) };

    kvant_codec_get_info(codecs[0], &first);
    kvant_scheme_get_info(kv->settings->scheme, &scheme);
    if (scheme.calibration != NULL &&
        kvant_calibration_get_entry(scheme.calibration, kv->shape.layer, n, kv->shape.role,
                                    &entry) == KVANT_OK)
        return "its kv heads are on several GPUs (-sm tensor), which a calibration does not "
               "support: unset KVANT_CALIBRATION, or move model.kvcal away";
    for (uint32_t head = 1; head < n; head++) {
        kvant_codec_get_info(codecs[head], &info);
        if (strcmp(first.spec, info.spec) != 0)
            return "kv heads of one layer have different codecs, which a GPU does not support: "
                   "give "
                   "them one codec, since seeds for each head do not lower the error, or set "
                   "KVANT_GPU=0";
    }
    if (first.block_tokens != 1 &&
        (first.learns_transform || kvp_gpu_tables(codecs[0]).key_transform_size > first.head_dim))
        return "its codec has a key transform and groups of several tokens, which a GPU does not "
               "support together: leave out transform=";
    if (first.block_tokens != 1 && kv->shape.n_streams > KVP_MOST_OPEN / 2)
        return "its codec has groups of several tokens, which a GPU supports for at most 68 "
               "streams: use --kv-unified";
    _Static_assert(KVP_MOST_OPEN / 2 == 68, "the message above says how many");
    if (kvp_gpu_tables(codecs[0]).pivots != NULL)
        return "its codec has feedback, which a GPU does not support: leave feedback out of the "
               "codec";
    if (kvp_gpu_tables(codecs[0]).centroids != NULL)
        return "kmeans is not supported on a GPU: use another codec, or set KVANT_GPU=0";
    if (kv->shape.n_streams > 1 && kv->shape.n_cells % KVANT_PAGE_TOKENS != 0)
        return "the number of cells of a stream is not a multiple of 64: set --kv-unified, or -c "
               "to a multiple of 64 times -np";
    return NULL;
}

void kvp_gpu_free_codecs(kvant_codec **codecs, uint32_t n)
{
    for (uint32_t i = 0; codecs != NULL && i < n; i++)
        kvant_codec_free(&codecs[i]);
    free(codecs);
}

/* Replaces dense rotations, which the kernels do not have, by a Hadamard matrix per block of
 * channels. Dense rotations are the default where head_dim is no power of two. */
static bool replace_dense_rotations(const kvp_kv *kv, kvp_gpu_cells *cells, char *err,
                                    size_t errlen)
{
    static const char dense[] = "rotate=dense";
    kvant_scheme_info scheme = { .size = sizeof(scheme) };
    kvant_codec_info info = { .size = sizeof(info) };
    char spec[256];

    kvant_codec_get_info(cells->sources[0], &info);
    if (strstr(info.spec, dense) == NULL ||
        kvp_gpu_tables(cells->sources[0]).key_transform_size > cells->head_dim)
        return true;
    kvant_scheme_get_info(kv->settings->scheme, &scheme);
    cells->own = calloc(cells->n_kv_heads, sizeof(*cells->own));
    for (uint32_t head = 0; cells->own != NULL && head < cells->n_kv_heads; head++) {
        const char *at;
        kvant_codec_get_info(cells->sources[head], &info);
        at = strstr(info.spec, dense);
        snprintf(spec, sizeof(spec), "%.*srotate=hadamard%s", (int)(at - info.spec), info.spec,
                 at + sizeof(dense) - 1);
        if (kvant_codec_create_calibrated(spec, cells->head_dim, kv->shape.role, 0,
                                          scheme.calibration, kv->shape.layer, head,
                                          &cells->own[head], err, errlen) != KVANT_OK)
            return false;
    }
    cells->sources = (const kvant_codec *const *)cells->own;
    kvp_kv_note_rotation(kv);
    return cells->own != NULL;
}

static void destroy(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;

    if (cells->cache != NULL)
        kvp_gpu_load_finish(cells->cache);
    pthread_mutex_lock(&cells->gpu->lock); /* graphs of other contexts look at all caches */
    kvp_gpu_learner_free(cells);
    if (kvp_gpu_enter(cells->gpu)) {
        kvp_gpu_finish(cells->gpu, kv->layers);
        kvp_gpu_release(&cells->numbers);
        kvp_gpu_release(&cells->key_center);
        kvp_gpu_release(&cells->starts);
        kvp_gpu_release(&cells->results);
        kvp_gpu_release(&cells->open);
        for (uint32_t i = 0; i < KVP_MOST_BUCKETS - 1; i++)
            kvp_gpu_release(&cells->further[i]);
        kvp_gpu_shift_free(cells);
        kvp_gpu_cache_leave(kv);
    }
    pthread_mutex_unlock(&cells->gpu->lock);
    for (int matrix = 0; matrix < 2; matrix++) {
        kvant_cuda_codec_free(&cells->open_codecs[matrix]);
        kvant_cuda_codec_free(&cells->codecs[matrix]);
    }
    kvant_codec_free(&cells->made);
    kvp_gpu_keep_none(cells);
    kvp_record_copy_free(&cells->form);
    kvp_gpu_free_codecs(cells->own, cells->n_kv_heads);
    free(cells);
    kv->cells = NULL;
}

static bool create_all(kvp_kv *kv, kvp_gpu_cells *cells, char *err, size_t errlen)
{
    kvant_codec_info info = { .size = sizeof(info) };
    const uint32_t n_blocks = kvp_kv_blocks(&kv->shape);
    bool ok;

    if (!kvp_gpu_enter(cells->gpu) || !replace_dense_rotations(kv, cells, err, errlen) ||
        kvant_cuda_codec_from(cells->sources[0], &cells->codecs[0], err, errlen) != KVANT_OK)
        return false;
    cells->codec = cells->codecs[0];
    kvant_codec_get_info(cells->sources[0], &info);
    cells->page_bytes = info.page_bytes;
    cells->group = info.block_tokens;
    cells->pages =
        (kvant_cuda_pages){ kv->memory, cells->n_kv_heads * info.page_bytes, info.page_bytes };
    cells->learns = info.center == KVANT_CENTER_FIRST || info.norm == KVANT_NORM_FIRST;
    cells->learns_key_transform = info.learns_transform && info.role == KVANT_ROLE_K;
    cells->most_key_transform_size = cells->learns_key_transform
                                         ? (size_t)cells->head_dim * cells->head_dim
                                         : kvp_gpu_tables(cells->sources[0]).key_transform_size;
    cells->matrix_bytes =
        cells->learns_key_transform
            ? kvant_cuda_compact_bytes(cells->head_dim, cells->n_kv_heads)
            : 2 * cells->n_kv_heads * cells->most_key_transform_size * sizeof(float);
    snprintf(err, errlen, "out of GPU memory for its tables");
    pthread_mutex_lock(&cells->gpu->lock);
    ok = n_blocks * cells->pages.block_stride <=
             kv->reserved - kvp_kv_open_bytes(&kv->shape, kv->settings) &&
         kvp_gpu_upload_transform(cells, cells->sources, NULL, NULL, cells->gpu->stream) &&
         count_to(cells->gpu, n_blocks * KVANT_PAGE_TOKENS + 1) && kvp_gpu_cache_join(kv, &info);
    if (ok)
        cells->cache->expanded_from = NULL; /* a layer with more heads moves the room */
    if (ok && cells->learns_key_transform)
        ok = kvp_gpu_grow(cells->gpu, &cells->cache->expanded,
                          kvp_gpu_expanded_bytes(cells->n_kv_heads, cells->head_dim), false);
    if (ok)
        kvp_gpu_use_transform(cells, cells->sources);
    if (ok && cells->learns_key_transform)
        kvp_gpu_learner_begin(cells);
    pthread_mutex_unlock(&cells->gpu->lock);
    return ok;
}

static bool create(kvp_kv *kv, const kvant_codec *const *codecs, uint32_t n_kv_heads,
                   uint32_t head_dim, char *err, size_t errlen)
{
    const char *refusal = refusal_of(kv, codecs, n_kv_heads);
    kvp_gpu_cells *cells = refusal == NULL ? calloc(1, sizeof(*cells)) : NULL;

    if (cells == NULL) {
        snprintf(err, errlen, "%s", refusal != NULL ? refusal : kvant_strerror(KVANT_ERR_MEMORY));
        return false;
    }
    cells->gpu = kv->remote->gpu;
    cells->sources = codecs;
    cells->n_kv_heads = n_kv_heads;
    cells->head_dim = head_dim;
    kv->cells = cells;
    if (create_all(kv, cells, err, errlen))
        return true;
    destroy(kv);
    return false;
}

/* Rows */

kvant_cuda_rows kvp_gpu_rows(const kvp_gpu_cells *cells, const float *rows, size_t stride,
                             kvp_gpu_run run)
{
    return (kvant_cuda_rows){ .codec = cells->codec,
                              .pages = cells->pages,
                              .rows = rows + run.first * stride,
                              .token_stride = stride,
                              .head_stride = cells->head_dim,
                              /* these rows are relative to their blocks' centres */
                              .center = cells->has_block_centers ? NULL : cells->center,
                              .scale = cells->scale,
                              .key_transform =
                                  kvp_gpu_matrix_of(cells, run.transform).key_transform };
}

/* Room that is kept between batches. States are read and written in batches of 512 rows, which for
 * most models have 2048 numbers or fewer. If less were kept, each of these batches would
 * allocate. */
#define KEPT_ROOM ((size_t)5 << 20)

/* Returns room on the GPU for a batch and its slots. The caller holds gpu->lock. No captured graph
 * uses the room. */
float *kvp_gpu_batch_room(kvp_gpu *gpu, size_t n, size_t width, int64_t **slots)
{
    const size_t bytes = n * width * sizeof(float), all = bytes + n * sizeof(**slots);

    if (all > gpu->batch.bytes && kvp_cu_finish(gpu->stream, "waiting for work"))
        kvp_gpu_release(&gpu->batch);
    if (!kvp_gpu_grow(gpu, &gpu->batch, all, false))
        return NULL;
    *slots = (int64_t *)(void *)((char *)gpu->batch.at + bytes);
    return gpu->batch.at;
}

void kvp_gpu_batch_done(kvp_gpu *gpu)
{
    if (gpu->batch.bytes > KEPT_ROOM && kvp_cu_finish(gpu->stream, "waiting for work"))
        kvp_gpu_release(&gpu->batch);
}

static kvant_status decode_run(const kvp_gpu_cells *cells, bool open, kvp_gpu_run run, float *out)
{
    kvp_gpu_matrix matrix = kvp_gpu_matrix_of(cells, run.transform);
    kvant_status status = kvp_gpu_expand(cells, false, &matrix);
    const kvant_cuda_decode_args args = { .size = sizeof(args),
                                          .codec = open ? cells->open_codec : cells->codec,
                                          .pages = open ? cells->open_pages : cells->pages,
                                          .blocks = kvp_gpu_iota(cells->gpu) + run.first,
                                          .n_blocks = (uint32_t)run.n,
                                          .n_kv_heads = cells->n_kv_heads,
                                          .type = KVANT_CUDA_F32,
                                          .out = out,
                                          .token_stride = kvp_gpu_width(cells),
                                          .head_stride = cells->head_dim,
                                          .center = cells->has_block_centers ? NULL : cells->center,
                                          .scale = cells->scale,
                                          .inverse_key_transform = matrix.inverse_key_transform };

    if (status == KVANT_OK)
        status = kvant_cuda_decode(&args, cells->gpu->stream);
    return status != KVANT_OK ? status
                              : kvp_gpu_center_blocks(cells, open, run.first, run.n, true, out);
}

/* open: decodes exact pages with these numbers instead of blocks. */
kvant_status kvp_gpu_decode_blocks(const kvp_gpu_cells *cells, bool open, size_t first, size_t n,
                                   float *out)
{
    kvant_status status = KVANT_OK;
    kvp_gpu_run run;

    for (size_t i = 0; i < n && status == KVANT_OK; i += run.n) {
        run = kvp_gpu_run_of_blocks(cells, open, first + i, n - i);
        status = decode_run(cells, open, run, out + i * KVANT_PAGE_TOKENS * kvp_gpu_width(cells));
    }
    return status;
}

bool kvp_gpu_fetch_block(const kvp_gpu_cells *cells, bool open, size_t block, float *rows)
{
    const size_t width = kvp_gpu_width(cells);
    int64_t *slots;
    float *room = kvp_gpu_batch_room(cells->gpu, KVANT_PAGE_TOKENS, width, &slots);

    return room != NULL && kvp_gpu_decode_blocks(cells, open, block, 1, room) == KVANT_OK &&
           kvp_cu_read(rows, room, KVANT_PAGE_TOKENS * width * sizeof(*rows), cells->gpu->stream);
}

kvant_status kvp_gpu_append(const kvp_gpu_cells *cells, kvant_role role,
                            const kvant_cuda_pages *open, const float *rows, kvp_gpu_run run,
                            const int64_t *slots, atomic_uint *refused)
{
    kvant_cuda_kernel_append_args args = { .size = sizeof(args),
                                           .type = KVANT_CUDA_F32,
                                           .n_tokens = (uint32_t)run.n,
                                           .n_kv_heads = cells->n_kv_heads,
                                           .slots = slots + run.first,
                                           .refused = kvp_gpu_word(refused) };

    kvant_cuda_rows *at = role == KVANT_ROLE_K ? &args.k : &args.v;

    *at = kvp_gpu_rows(cells, rows, kvp_gpu_width(cells), run);
    if (open != NULL) {
        at->codec = cells->open_codec;
        at->pages = *open;
    }
    if (role == KVANT_ROLE_K)
        kvp_gpu_use_matrices(cells, run, &args);
    return kvant_cuda_kernel_append(&args, cells->gpu->stream);
}

void kvp_gpu_unlearn(kvp_gpu_cells *cells)
{
    cells->learned = false;
    kvp_gpu_keep_none(cells);
    if (cells->learns) {
        cells->center = cells->scale = NULL;
        if (cells->learns_key_transform) {
            cells->further_made = 0;
            cells->has_block_centers = false;
            cells->key_transform_size = 0;
            cells->codec = cells->codecs[0];
            cells->open_codec = cells->open_codecs[0];
        }
        if (cells->key_transform_size != cells->head_dim)
            cells->query_scale = NULL;
        atomic_fetch_add(&cells->gpu->epoch, 1);
    }
}

static void clear(kvp_kv *kv)
{
    kvp_gpu_cells *cells = kv->cells;

    pthread_mutex_lock(&cells->gpu->lock); /* graphs of other contexts look at all caches */
    if (kvp_gpu_enter(cells->gpu))
        kvp_gpu_finish(cells->gpu, kv->layers);
    if (cells->rope.size != 0)
        atomic_fetch_add(&cells->gpu->epoch, 1); /* captured graphs use moved keys' matrices */
    kvp_gpu_shift_free(cells);
    kvp_gpu_in_place_forget(cells->cache);
    kvp_gpu_cache_forget(cells->cache);
    kvp_gpu_unlearn(cells);
    cells->has_key_transform = false;
    if (cells->learns_key_transform)
        kvp_gpu_learner_begin(cells);
    pthread_mutex_unlock(&cells->gpu->lock);
}

const kvp_remote kvp_gpu_remote = { .create = create,
                                    .destroy = destroy,
                                    .read = kvp_gpu_read_rows,
                                    .write = kvp_gpu_write_rows,
                                    .clear = clear,
                                    .copy = kvp_gpu_copy_blocks,
                                    .block_state = kvp_gpu_block_state,
                                    .record_size = kvp_gpu_record_size,
                                    .export_record = kvp_gpu_export_record,
                                    .codecs = kvp_gpu_codecs_of,
                                    .restore = kvp_gpu_restore,
                                    .hold = kvp_gpu_hold,
                                    .forget_others = kvp_gpu_forget_others };
