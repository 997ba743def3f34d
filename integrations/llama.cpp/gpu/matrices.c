/* matrices.c - the transforms of a cache tensor in GPU memory: centres, scales and matrices, how
 * they come there, and which matrices a block has. first_matrix.c and buckets.c decide when. */
#include "gpu.h"
#include "restored.h"

#include <stdlib.h>
#include <string.h>

/* The centre as attention needs it. With a full matrix the centre is transformed like a key,
 * because queries have been transformed by the inverse. */
static void read_key_center(kvant_cuda_tables tables, const float *center, size_t d, float *to)
{
    if (tables.key_transform_size <= d)
        memcpy(to, center, d * sizeof(*to));
    for (size_t j = 0; j < d && tables.key_transform_size > d; j++) {
        double sum = 0;
        for (size_t i = 0; i < d; i++)
            sum += (double)tables.key_transform[i * d + j] * center[i];
        to[j] = (float)sum;
    }
}

/* Fills the arrays of a transform after its matrices, each kv head after kv head. host is zeroed on
 * entry. */
static void read_affine(const kvp_gpu_cells *cells, const kvant_codec *const *codecs, float *host)
{
    const size_t width = kvp_gpu_width(cells), d = cells->head_dim;

    for (uint32_t head = 0; head < cells->n_kv_heads; head++) {
        const kvant_cuda_tables tables = kvp_gpu_tables(codecs[head]);
        for (size_t j = 0; j < d; j++) {
            float *numbers = host + head * d + j;
            const float s = tables.scale != NULL ? tables.scale[j] : 1;
            numbers[0] = tables.center != NULL ? tables.center[j] : 0;
            numbers[width] = s;
            numbers[2 * width] =
                s * (tables.key_transform_size == d ? tables.inverse_key_transform[j] : 1);
        }
        if (tables.center != NULL)
            read_key_center(tables, tables.center, d, host + 3 * width + head * d);
    }
}

static bool copy_in(void *to, const float *from, size_t n, cu_stream stream)
{
    return kvp_cu_write(to, from, n * sizeof(*from), stream);
}

/* Copies a position bucket's centres: of a block at position 0, and of a block whose position is
 * not known (start NULL: none). Waits for the stream. */
static bool bring_centers(kvp_gpu_cells *cells, uint32_t bucket, const float *start,
                          const float *mean, cu_stream stream)
{
    const size_t width = kvp_gpu_width(cells);
    bool ok = true;

    if (start != NULL)
        ok = kvp_gpu_grow(cells->gpu, &cells->starts, 2 * KVP_MOST_BUCKETS * width * sizeof(*start),
                          false) &&
             copy_in((float *)cells->starts.at + bucket * width, start, width, stream) &&
             copy_in((float *)cells->starts.at + (KVP_MOST_BUCKETS + bucket) * width, mean, width,
                     stream);
    return kvp_cu_finish(stream, "copying") && ok;
}

/* The memory of a position bucket's matrices. */
static kvp_gpu_memory *memory_of(kvp_gpu_cells *cells, uint32_t bucket)
{
    return bucket == 0 ? &cells->numbers : &cells->further[bucket - 1];
}

static bool have_matrices(kvp_gpu_cells *cells, uint32_t bucket)
{
    const size_t affine = bucket == 0 ? 3 * kvp_gpu_width(cells) * sizeof(float) : 0;

    return kvp_gpu_grow(cells->gpu, memory_of(cells, bucket), cells->matrix_bytes + affine, false);
}

static const void *matrices_at(const kvp_gpu_cells *cells, uint32_t bucket)
{
    return bucket == 0 ? cells->numbers.at : cells->further[bucket - 1].at;
}

/* The memory that gets the compact form of a bucket's matrices; NULL without memory. The W of
 * the former compact form is no longer of use. */
static void *compact_of(kvp_gpu_cells *cells, uint32_t bucket)
{
    cells->cache->expanded_from = NULL;
    return have_matrices(cells, bucket) ? memory_of(cells, bucket)->at : NULL;
}

bool kvp_gpu_bring_triangles(kvp_gpu_cells *cells, uint32_t bucket, const uint16_t *triangles,
                             cu_stream stream)
{
    const kvant_cuda_compact_args args = { .size = sizeof(args),
                                           .head_dim = cells->head_dim,
                                           .n_kv_heads = cells->n_kv_heads,
                                           .triangles = triangles,
                                           .compact = compact_of(cells, bucket) };

    return args.compact != NULL && kvant_cuda_compact(&args, stream) == KVANT_OK;
}

bool kvp_gpu_bring_all_triangles(kvp_gpu_cells *const *cells, uint32_t n,
                                 kvant_cuda_compact_layer *layers, kvant_cuda_compact_layer *at)
{
    const kvant_cuda_compact_args args = { .size = sizeof(args),
                                           .head_dim = cells[0]->head_dim,
                                           .n_kv_heads = cells[0]->n_kv_heads,
                                           .layers = at,
                                           .n_layers = n };
    cu_stream stream = cells[0]->gpu->stream;
    bool ok = true;

    for (uint32_t i = 0; i < n && ok; i++)
        ok = (layers[i].compact = compact_of(cells[i], 0)) != NULL;
    return ok && kvp_cu_write(at, layers, n * sizeof(*at), stream) &&
           kvant_cuda_compact(&args, stream) == KVANT_OK;
}

kvant_cuda_center_layer kvp_gpu_places_of(const kvp_gpu_cells *cells, uint32_t bucket,
                                          const float *center, const float *start)
{
    const size_t width = kvp_gpu_width(cells);
    float *starts = (float *)cells->starts.at + bucket * width;

    return (kvant_cuda_center_layer){
        .center = center,
        .start = start,
        .centers = { starts + KVP_MOST_BUCKETS * width,
                     bucket == 0 ? kvp_gpu_affine(cells, &cells->numbers) : NULL },
        .starts = starts,
        .compact = cells->numbers.at,
        .key_center = bucket == 0 ? cells->key_center.at : NULL
    };
}

bool kvp_gpu_place_centers(const kvp_gpu_cells *cells, const kvant_cuda_center_layer *layers,
                           uint32_t n, kvant_cuda_center_layer *at)
{
    kvant_cuda_place_centers_args args = { .size = sizeof(args),
                                           .codec = cells->codecs[0],
                                           .n_kv_heads = cells->n_kv_heads,
                                           .one = layers[0] };

    if (n > 1) {
        args.layers = at;
        args.n_layers = n;
    }
    return (n == 1 || kvp_cu_write(at, layers, n * sizeof(*at), cells->gpu->stream)) &&
           kvant_cuda_place_centers(&args, cells->gpu->stream) == KVANT_OK;
}

/* Brings the triangles of a transform as records hold it, where they follow centre and scale. Their
 * bytes are padded there. */
static bool bring_kept(kvp_gpu_cells *cells, uint32_t bucket, const void *kept, cu_stream stream)
{
    const size_t halves = kvant_cuda_triangle_halves(cells->head_dim, cells->n_kv_heads);
    const float *triangles =
        kept != NULL ? (const float *)(const void *)((const char *)kept + KVANT_TRANSFORM_HEAD) +
                           2 * kvp_gpu_width(cells)
                     : NULL;
    void *room = cells->cache->expanded.at;

    cells->cache->expanded_from = NULL;
    return triangles != NULL && copy_in(room, triangles, (halves + 1) / 2, stream) &&
           kvp_gpu_bring_triangles(cells, bucket, room, stream);
}

/* Brings the matrices of codecs that have them from a calibration. */
static bool bring_weights(kvp_gpu_cells *cells, const kvant_codec *const *codecs, cu_stream stream)
{
    const size_t n = kvp_gpu_tables(codecs[0]).key_transform_size;
    bool ok = n <= cells->most_key_transform_size && have_matrices(cells, 0);

    for (uint32_t head = 0; head < cells->n_kv_heads && ok && n > 0; head++) {
        const kvant_cuda_tables tables = kvp_gpu_tables(codecs[head]);
        float *at = (float *)cells->numbers.at + head * n;
        ok = copy_in(at, tables.key_transform, n, stream) &&
             copy_in(at + cells->n_kv_heads * cells->most_key_transform_size,
                     tables.inverse_key_transform, n, stream);
    }
    return ok;
}

bool kvp_gpu_upload_transform(kvp_gpu_cells *cells, const kvant_codec *const *codecs,
                              const void *kept, const float *start, cu_stream stream)
{
    const size_t width = kvp_gpu_width(cells);
    float *host = calloc(4 * width, sizeof(*host));
    bool ok = host != NULL && (cells->learns_key_transform ? have_matrices(cells, 0)
                                                           : bring_weights(cells, codecs, stream));

    if (ok && cells->learns_key_transform &&
        kvp_gpu_tables(codecs[0]).key_transform_size > cells->head_dim)
        ok = bring_kept(cells, 0, kept, stream);
    if (ok)
        read_affine(cells, codecs, host);
    ok = ok && kvp_gpu_grow(cells->gpu, &cells->key_center, width * sizeof(*host), false) &&
         copy_in(cells->key_center.at, host + 3 * width, width, stream) &&
         copy_in(kvp_gpu_affine(cells, &cells->numbers), host, 3 * width, stream) &&
         bring_centers(cells, 0, start, host, stream);
    free(host);
    return ok;
}

bool kvp_gpu_upload_bucket(kvp_gpu_cells *cells, uint32_t bucket,
                           const kvp_gpu_learned_transform *learned, const float *mean)
{
    return bring_kept(cells, bucket, learned->kept, cells->gpu->stream) &&
           bring_centers(cells, bucket, learned->start, mean, cells->gpu->stream);
}

/* The matrices of KVP_PLAIN: the codec's rotation times the diagonal of the scale. */
static bool read_plain(const kvp_gpu_cells *cells, uint32_t head, const float *scale, float *host)
{
    const size_t d = cells->head_dim, room = cells->n_kv_heads * cells->most_key_transform_size;
    float unit[KVANT_MAX_HEAD_DIM] = { 0 };
    bool ok = true;

    for (size_t i = 0; i < d && ok; i++) {
        float *key_transform = host + head * cells->most_key_transform_size + i * d,
              *inverse = key_transform + room;
        const float s = scale != NULL ? scale[head * d + i] : 1;
        unit[i] = 1;
        ok = kvant_codec_transform_query(cells->sources[head], NULL, unit, inverse) == KVANT_OK;
        unit[i] = 0;
        for (size_t j = 0; j < d; j++) {
            key_transform[j] = inverse[j] / s;
            inverse[j] *= s;
        }
    }
    return ok;
}

/* Blocks of such keys have no known position, so their centre does not rotate. */
bool kvp_gpu_upload_plain(kvp_gpu_cells *cells, const float *center, const float *scale)
{
    const size_t width = kvp_gpu_width(cells),
                 n = 2 * cells->n_kv_heads * cells->most_key_transform_size;
    float *host = calloc(n + width, sizeof(*host)), *mean = host + n;
    bool ok = host != NULL;

    for (uint32_t head = 0; head < cells->n_kv_heads && ok; head++)
        ok = read_plain(cells, head, scale, host);
    if (ok && center != NULL)
        memcpy(mean, center, width * sizeof(*mean));
    ok = ok && kvp_gpu_grow(cells->gpu, &cells->further[KVP_PLAIN - 1], n * sizeof(*host), false) &&
         copy_in(cells->further[KVP_PLAIN - 1].at, host, n, cells->gpu->stream) &&
         bring_centers(cells, KVP_PLAIN, mean, mean, cells->gpu->stream);
    cells->further_made |= (uint32_t)ok << KVP_PLAIN;
    if (ok)
        kvp_gpu_keep_affine(cells, KVP_PLAIN, center, scale);
    free(host);
    return ok;
}

void kvp_gpu_use_transform(kvp_gpu_cells *cells, const kvant_codec *const *codecs)
{
    const size_t width = kvp_gpu_width(cells);
    float *at = kvp_gpu_affine(cells, &cells->numbers);
    bool key_transform = false, center = false, scale = false;

    for (uint32_t head = 0; head < cells->n_kv_heads && codecs[head] != NULL; head++) {
        const kvant_cuda_tables tables = kvp_gpu_tables(codecs[head]);
        key_transform = key_transform || tables.key_transform_size > 0;
        center = center || tables.center != NULL;
        scale = scale || tables.scale != NULL;
    }
    for (uint32_t i = 0; i < KVP_MOST_MOVED; i++)
        cells->moved[i].of = (kvp_gpu_lineage){ 0 }; /* these were made from the former matrices */
    cells->key_transform_size = key_transform ? kvp_gpu_tables(codecs[0]).key_transform_size : 0;
    cells->center = center && !cells->uncentred ? at : NULL;
    cells->scale = scale ? at + width : NULL;
    cells->query_scale =
        scale || cells->key_transform_size == cells->head_dim ? at + 2 * width : NULL;
}

static kvp_gpu_matrix weights_at(const kvp_gpu_cells *cells, const void *numbers)
{
    const float *at = numbers;

    return (kvp_gpu_matrix){ NULL, at, at + cells->n_kv_heads * cells->most_key_transform_size };
}

/* Keys of a layer without RoPE do not change when keys of other layers move, so they keep their
 * bucket's matrices. */
kvp_gpu_matrix kvp_gpu_matrix_of(const kvp_gpu_cells *cells, uint32_t transform)
{
    const kvp_gpu_lineage lineage = cells->cache->buckets.lineages[transform];
    const struct kvp_gpu_moved *moved =
        &cells->moved[transform < KVP_MOST_BUCKETS ? 0 : transform - KVP_MOST_BUCKETS];
    uint32_t bucket = lineage.bucket;

    if (lineage.by != 0 && moved->of.by == lineage.by && moved->of.bucket == lineage.bucket)
        return weights_at(cells, moved->numbers.at);
    while (bucket > 0 && !(cells->further_made >> bucket & 1))
        bucket--;
    if (bucket == KVP_PLAIN ||
        (bucket == 0 && !cells->learns_key_transform && cells->key_transform_size > 0))
        return weights_at(cells, matrices_at(cells, bucket));
    return (kvp_gpu_matrix){ .compact = bucket == 0 && cells->key_transform_size == 0
                                            ? NULL
                                            : matrices_at(cells, bucket) };
}

kvant_status kvp_gpu_expand(const kvp_gpu_cells *cells, bool rows, kvp_gpu_matrix *matrix)
{
    float *const room = cells->cache->expanded.at;
    float *const inverse = room + kvp_gpu_width(cells) * cells->head_dim;
    const kvant_cuda_expand_args args = { .size = sizeof(args),
                                          .codec = cells->codec,
                                          .n_kv_heads = cells->n_kv_heads,
                                          .compact = matrix->compact,
                                          .key_transform = rows ? room : NULL,
                                          .inverse_key_transform = inverse };

    if (matrix->compact == NULL)
        return KVANT_OK;
    cells->cache->expanded_from = NULL;
    *matrix = (kvp_gpu_matrix){ NULL, rows ? room : NULL, inverse };
    return kvant_cuda_expand(&args, cells->gpu->stream);
}

void kvp_gpu_use_matrices(const kvp_gpu_cells *keys, kvp_gpu_run run,
                          kvant_cuda_kernel_append_args *args)
{
    args->k_compact = kvp_gpu_matrix_of(keys, run.transform).compact;
    args->k_matrix = keys->cache->expanded.at;
    args->k_matrix_of = &keys->cache->expanded_from;
}

void kvp_gpu_forget_expanded(kvp_gpu *gpu)
{
    for (kvp_gpu_cache *cache = gpu->caches; cache != NULL; cache = cache->next)
        cache->expanded_from = NULL;
}
