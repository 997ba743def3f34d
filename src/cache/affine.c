/* affine.c - see affine.h. The rules are in docs/architecture.md, "Centre and factors". */
#include "affine.h"

#include <math.h>
#include <string.h>

#include "../base/alloc.h"
#include "../base/half.h"
#include "open.h"

/* A page of rows: enough for a mean that removes nearly all of the constant part, and what fits a small
 * pool. */
#define FIRST_ROWS 64u

/* The smallest factor, in parts of the head's largest: a channel that happened to be constant in the first
 * rows must not blow up later ones. 2^-8 of the square roots stands for a range of 2^16 between channels. */
#define SMALLEST_FACTOR 0.00390625f

static bool waits(const kvant_cells *cells)
{
    const kvant_codec_info *info = &cells->config.codec->info;
    return info->center == KVANT_CENTER_FIRST || info->norm == KVANT_NORM_FIRST;
}

static bool from_file(const kvant_codec_info *info, bool scale)
{
    return scale ? info->norm == KVANT_NORM_FILE : info->center == KVANT_CENTER_FILE;
}

static bool any_from_file(const kvant_cells *cells, bool scale)
{
    for (uint32_t head = 0; head < cells->config.n_kv_heads; head++)
        if (from_file(&cells->codecs[head]->info, scale))
            return true;
    return false;
}

/* Copies what the calibration gives each head that asks for it, to the others what changes nothing; false when it has nothing for one. */
static bool load(const kvant_cells *cells, bool scale, float *out)
{
    uint32_t d = cells->config.codec->info.head_dim;
    for (uint32_t head = 0; head < cells->config.n_kv_heads; head++) {
        const kvant_codec *codec = cells->codecs[head];
        const float *source = scale ? codec->file_scale : codec->file_center;
        bool asks = from_file(&codec->info, scale);
        if (asks && !source)
            return false;
        for (uint32_t j = 0; j < d; j++)
            out[(size_t)head * d + j] = asks ? source[j] : scale ? 1 : 0;
    }
    return true;
}

kvant_status kvant_affine_create(kvant_cells *cells)
{
    size_t n = kvant_cells_width(cells);
    cells->center = kvant_alloc(n, sizeof *cells->center);
    cells->scale = kvant_alloc(n, sizeof *cells->scale);
    KVANT_RETURN_IF(!cells->center || !cells->scale, KVANT_ERR_MEMORY);
    KVANT_RETURN_IF(!load(cells, false, cells->center) || !load(cells, true, cells->scale), KVANT_ERR_UNSUPPORTED);
    if (waits(cells)) {
        cells->first.sum = kvant_alloc(n, sizeof *cells->first.sum);
        cells->first.min = kvant_alloc(n, sizeof *cells->first.min);
        cells->first.max = kvant_alloc(n, sizeof *cells->first.max);
        KVANT_RETURN_IF(!cells->first.sum || !cells->first.min || !cells->first.max, KVANT_ERR_MEMORY);
    }
    kvant_affine_reset(cells);
    return KVANT_OK;
}

void kvant_affine_destroy(kvant_cells *cells)
{
    kvant_free(cells->center);
    kvant_free(cells->scale);
    kvant_free(cells->first.sum);
    kvant_free(cells->first.min);
    kvant_free(cells->first.max);
}

void kvant_affine_reset(kvant_cells *cells)
{
    cells->first.waiting = waits(cells);
    cells->first.n = 0;
    cells->has_center = any_from_file(cells, false) && load(cells, false, cells->center);
    cells->has_scale = any_from_file(cells, true) && load(cells, true, cells->scale);
}

size_t kvant_affine_see(kvant_cells *cells, const float *rows, size_t stride, size_t n, bool *freeze)
{
    kvant_first_rows *first = &cells->first;
    size_t width = kvant_cells_width(cells);
    bool at_once = first->n == 0 && n >= FIRST_ROWS;
    if (!at_once && n > FIRST_ROWS - first->n)
        n = FIRST_ROWS - first->n;
    for (size_t i = 0; i < n; i++) {
        const float *row = rows + i * stride;
        bool start = first->n == 0 && i == 0;
        for (size_t j = 0; j < width; j++) {
            first->sum[j] = start ? row[j] : first->sum[j] + row[j];
            first->min[j] = start || row[j] < first->min[j] ? row[j] : first->min[j];
            first->max[j] = start || row[j] > first->max[j] ? row[j] : first->max[j];
        }
    }
    first->n += (uint32_t)n;
    *freeze = first->n >= FIRST_ROWS;
    return at_once ? 0 : n;
}

/* InnerQ's factor of a channel, the square root of its largest magnitude, here after the centre was taken
 * away. */
static void compute_factors(const kvant_cells *cells, const float *center, uint32_t head, float *scale)
{
    uint32_t d = cells->config.codec->info.head_dim;
    const float *min = cells->first.min + (size_t)head * d, *max = cells->first.max + (size_t)head * d;
    float largest = 0;
    for (uint32_t j = 0; j < d; j++) {
        float c = center ? center[j] : 0;
        scale[j] = sqrtf(fmaxf(max[j] - c, c - min[j]));
        largest = fmaxf(largest, scale[j]);
    }
    float floor = largest > 0 ? largest * SMALLEST_FACTOR : 1;
    for (uint32_t j = 0; j < d; j++)
        scale[j] = fmaxf(scale[j], floor);
}

static void compute(kvant_cells *cells)
{
    const kvant_codec_info *info = &cells->config.codec->info;
    size_t width = kvant_cells_width(cells);
    for (size_t j = 0; info->center == KVANT_CENTER_FIRST && j < width; j++)
        cells->center[j] = (float)(cells->first.sum[j] / cells->first.n);
    for (uint32_t head = 0; info->norm == KVANT_NORM_FIRST && head < cells->config.n_kv_heads; head++) {
        size_t at = (size_t)head * info->head_dim;
        compute_factors(cells, info->center ? cells->center + at : NULL, head, cells->scale + at);
    }
}

/* One row of an open page from the old affine to the new one. */
static void reexpress(const kvant_codec *open, const kvant_affine *from, const kvant_affine *to, const void *page,
                      uint32_t token, float *y)
{
    float old[KVANT_MAX_HEAD_DIM], x[KVANT_MAX_HEAD_DIM];
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    kvant_codec_decode_transformed(open, kernels, page, token, old);
    kvant_transform_inverse(&open->transform, kernels, from, old, x);
    kvant_transform_forward(&open->transform, kernels, to, x, y);
}

static bool fits_half(const float *y, uint32_t n)
{
    for (uint32_t j = 0; j < n; j++)
        if (!(fabsf(y[j]) <= KVANT_HALF_MAX))
            return false;
    return true;
}

/* The written rows of a head's open page; with store they are replaced, else only looked at. */
static bool reexpress_page(kvant_cells *cells, int32_t slot, uint32_t head, const kvant_affine *from,
                           const kvant_affine *to, bool store)
{
    const kvant_codec *open = cells->open_codecs[head];
    void *page = kvant_open_page(cells, slot, head);
    uint64_t written = cells->groups[cells->slots[slot].group].written;
    for (uint32_t t = 0; t < KVANT_PAGE_TOKENS; t++) {
        float y[KVANT_MAX_HEAD_DIM];
        if (!(written >> t & 1))
            continue;
        reexpress(open, from, to, page, t, y);
        if (!fits_half(y, open->info.head_dim))
            return false;
        if (store)
            kvant_codec_encode_transformed(open, kvant_kernels_get(KVANT_CPU_AUTO), y, t, 1, page);
    }
    return true;
}

static bool reexpress_all(kvant_cells *cells, bool had_center, bool had_scale, bool store)
{
    for (uint32_t slot = 0; slot < cells->n_slots; slot++)
        for (uint32_t head = 0; cells->slots[slot].group >= 0 && head < cells->config.n_kv_heads; head++) {
            kvant_affine to = kvant_cells_head_affine(cells, head), from = to;
            from.center = had_center ? to.center : NULL;
            from.scale = had_scale ? to.scale : NULL;
            if (!reexpress_page(cells, (int32_t)slot, head, &from, &to, store))
                return false;
        }
    return true;
}

kvant_status kvant_affine_freeze(kvant_cells *cells)
{
    const kvant_codec_info *info = &cells->config.codec->info;
    bool had_center = cells->has_center, had_scale = cells->has_scale;
    compute(cells);
    cells->has_center = info->center != KVANT_CENTER_NONE;
    cells->has_scale = info->norm != KVANT_NORM_NONE;
    if (!reexpress_all(cells, had_center, had_scale, false)) {
        cells->has_center = had_center;
        cells->has_scale = had_scale;
        return KVANT_ERR_RANGE;
    }
    reexpress_all(cells, had_center, had_scale, true);
    cells->first.waiting = false;
    return KVANT_OK;
}

static bool same_numbers(const kvant_cells *cells, const float *a, bool has_a, const float *b, bool has_b)
{
    return has_a == has_b && (!has_a || memcmp(a, b, kvant_cells_width(cells) * sizeof *a) == 0);
}

static void copy_first_rows(const kvant_cells *from, kvant_cells *to)
{
    size_t n = kvant_cells_width(from);
    to->first.n = from->first.n;
    memcpy(to->first.sum, from->first.sum, n * sizeof *to->first.sum);
    memcpy(to->first.min, from->first.min, n * sizeof *to->first.min);
    memcpy(to->first.max, from->first.max, n * sizeof *to->first.max);
}

kvant_status kvant_affine_share(const kvant_cells *from, kvant_cells *to)
{
    if (same_numbers(to, from->center, from->has_center, to->center, to->has_center) &&
        same_numbers(to, from->scale, from->has_scale, to->scale, to->has_scale) &&
        from->first.waiting == to->first.waiting)
        return KVANT_OK;
    KVANT_RETURN_IF(to->any_written, KVANT_ERR_ARGUMENT);
    kvant_affine affine = kvant_cells_affine(from);
    KVANT_FORWARD(kvant_cells_set_affine(to, &affine));
    to->first.waiting = from->first.waiting;
    if (from->first.waiting)
        copy_first_rows(from, to);
    return KVANT_OK;
}

kvant_affine kvant_cells_affine(const kvant_cells *cells)
{
    return kvant_cells_head_affine(cells, 0);
}

static kvant_status check(const kvant_affine *affine, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float center = affine->center ? affine->center[i] : 0, scale = affine->scale ? affine->scale[i] : 1;
        KVANT_RETURN_IF(!isfinite(center) || !isfinite(scale), KVANT_ERR_NONFINITE);
        KVANT_RETURN_IF(!(scale > 0), KVANT_ERR_ARGUMENT);
    }
    return KVANT_OK;
}

kvant_status kvant_cells_set_affine(kvant_cells *cells, const kvant_affine *affine)
{
    KVANT_RETURN_IF(!cells || !affine || cells->any_written, KVANT_ERR_ARGUMENT);
    size_t n = kvant_cells_width(cells);
    KVANT_FORWARD(check(affine, n));
    cells->has_center = affine->center != NULL;
    cells->has_scale = affine->scale != NULL;
    if (affine->center)
        memmove(cells->center, affine->center, n * sizeof *cells->center);
    if (affine->scale)
        memmove(cells->scale, affine->scale, n * sizeof *cells->scale);
    cells->first.waiting = false;
    return KVANT_OK;
}
