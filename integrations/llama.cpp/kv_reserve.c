/* kv_reserve.c - how many bytes a cache tensor reserves, before head_dim and the number of layers
 * are known (see kv_tensor.h). Finds the exact part, the place of its pages, and the most bytes
 * that any head_dim needs. Depends on the shape and on the settings only, because ggml asks several
 * times. */
#include <stdio.h>
#include <string.h>

#include "../../src/store/plan.h"
#include "kv_steps.h"
#include "kv_tensor.h"

#define GPU_ALIGN 256u     /* alignment of fp16 pages */
#define LEAST_HEAD_DIM 64u /* few models have a smaller one */

static bool is_placed(const kvp_kv_shape *shape)
{
    return shape->n_streams == 1 && !shape->in_order;
}

static uint32_t blocks_per_stream(const kvp_kv_shape *shape)
{
    return (uint32_t)kvant_plan_blocks(shape->n_cells);
}

kvant_exact_part kvp_kv_exact(const kvp_kv_shape *shape, const kvp_settings *settings,
                              uint32_t n_sequences)
{
    kvant_exact_part part = { .size = sizeof(part) };

    kvant_scheme_exact(settings->scheme, (uint64_t)shape->n_cells * shape->n_streams, n_sequences,
                       &part);
    if (!shape->window || part.step == 0)
        return part;
    /* A sliding window is little longer than a batch. An eighth of its cells, as in other short
     * caches, would hold few of a batch's rows, and all others would be sealed before their own
     * attention. On a CPU all layers share the pages of a step. */
    if (shape->in_order) {
        part.step = shape->n_cells < KVANT_EXACT_STEP ? shape->n_cells : KVANT_EXACT_STEP;
        return part;
    }
    /* The first tokens of a sequence leave a sliding window. Its newest tokens need whole blocks,
     * which are a large part of so short a cache. In Gemma-3 they took 11 % of the memory, and
     * lowered the KL divergence by 3 % with balanced and by 8 % with small. So only the rows of a
     * step stay fp16. */
    part.first = part.newest = part.total = 0;
    return part;
}

bool kvp_kv_tensor_params(const kvp_kv_shape *shape, const kvp_settings *settings,
                          kvant_tensor_params *params, kvant_exact_part *part, char *err,
                          size_t errlen)
{
    bool placed = is_placed(shape);
    uint64_t blocks = placed ? kvp_placement_blocks(shape->n_cells)
                             : (uint64_t)blocks_per_stream(shape) * shape->n_streams;

    *params =
        (kvant_tensor_params){ .size = sizeof(*params),
                               .n_sequences = placed ? KVP_WINDOW_SEQUENCES : shape->n_streams,
                               .n_blocks = (uint32_t)blocks,
                               .blocks_per_sequence = placed ? 0 : blocks_per_stream(shape),
                               .exact = part,
                               .steps = kvp_steps_none() };
    /* On a GPU exact rows have their own pages, which kvp_kv_open_pages counts. */
    *part = (kvant_exact_part){ .size = sizeof(*part) };
    if (!shape->in_order)
        *part = kvp_kv_exact(shape, settings, params->n_sequences);
    if (blocks <= INT32_MAX)
        return true;
    snprintf(err, errlen,
             "%u cells x %u streams are too many for a cache: choose a smaller -c or -np",
             shape->n_cells, shape->n_streams);
    return false;
}

uint32_t kvp_kv_blocks(const kvp_kv_shape *shape)
{
    return blocks_per_stream(shape) * shape->n_streams;
}

kvant_scheme_location kvp_kv_location(const kvp_kv_shape *shape, uint32_t n_layers,
                                      uint32_t head_dim)
{
    return (kvant_scheme_location){ .size = sizeof(kvant_scheme_location),
                                    .role = shape->role,
                                    .layer = shape->layer,
                                    .n_layers = n_layers,
                                    .n_kv_heads = head_dim != 0 ? shape->row / head_dim : 0,
                                    .head_dim = head_dim };
}

uint32_t kvp_kv_known_head_dim(const kvp_kv_shape *shape, const kvp_settings *settings)
{
    uint32_t head_dim = 0;

    kvant_scheme_head_dim(settings->scheme, shape->layer, shape->role, &head_dim);
    return head_dim != 0 ? head_dim : settings->head_dim;
}

/* fp16 pages for codecs that the user chose by specs. An fp16 page has about 4 times the bytes of a
 * sealed page, so these pages are 3 % of a long cache. With fewer, blocks are sealed sooner. */
#define LEAST_OPEN 8u
#define USUAL_OPEN 20u

/* Pages for each further stream, for codecs whose groups have several tokens. Blocks are encoded as
 * a whole, so the block that a stream writes to needs a page. With fewer pages, some streams would
 * encode their block again for each token. The second page is for the newest tokens that most of
 * these codecs keep exact. */
#define OPEN_OF_STREAM 2u

static bool has_word(const char *spec, const char *const *words, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strstr(spec, words[i]) != NULL)
            return true;
    return false;
}

static bool may_have_groups(const char *spec)
{
    static const char *const words[] = { "kivi", "innerq", "axis=channel", "turboquant-2.5",
                                         "turboquant-3.5" };

    return has_word(spec, words, sizeof(words) / sizeof(words[0]));
}

bool kvp_kv_may_have_groups(const kvp_kv_shape *shape, const kvp_settings *settings)
{
    kvant_scheme_info info = { .size = sizeof(info) };
    kvant_settings_info file = { .size = sizeof(file) };
    kvant_settings_layer layer = { 0 };
    bool any = false;

    kvant_scheme_get_info(settings->scheme, &info);
    if (info.settings == NULL)
        return may_have_groups(shape->role == KVANT_ROLE_K ? info.k : info.v);
    kvant_settings_get_info(info.settings, &file);
    for (uint32_t i = 0; i < file.n_layers && !any; i++)
        if (kvant_settings_get_layer(info.settings, i, shape->role, &layer) == KVANT_OK)
            any = may_have_groups(layer.spec != NULL ? layer.spec : layer.heads[0]);
    return any;
}

/* The fp16 pages of a cache whose codecs were chosen by specs. */
static uint32_t pages_of_specs(const kvp_kv_shape *shape, const kvp_settings *settings)
{
    kvant_scheme_info info = { .size = sizeof(info) };
    const uint32_t usual = kvp_kv_blocks(shape) / 128;
    const uint32_t n = usual < LEAST_OPEN ? LEAST_OPEN : usual > USUAL_OPEN ? USUAL_OPEN : usual;
    uint32_t of_streams;

    kvant_scheme_get_info(settings->scheme, &info);
    if (!may_have_groups(info.k) && !may_have_groups(info.v))
        return n;
    of_streams = LEAST_OPEN + (shape->n_streams - 1) * OPEN_OF_STREAM;
    of_streams = of_streams > KVP_MOST_OPEN ? KVP_MOST_OPEN : of_streams;
    of_streams = of_streams > kvp_kv_blocks(shape) ? kvp_kv_blocks(shape) : of_streams;
    return of_streams > n ? of_streams : n;
}

uint32_t kvp_kv_open_pages(const kvp_kv_shape *shape, const kvp_settings *settings)
{
    const kvant_exact_part part = kvp_kv_exact(shape, settings, shape->n_streams);
    const uint32_t n_blocks = kvp_kv_blocks(shape);
    uint32_t n;

    if (part.step == 0)
        return pages_of_specs(shape, settings);
    n = (uint32_t)kvant_plan_pages(part.total, part.first + part.newest, part.step);
    n = n > KVP_MOST_OPEN ? KVP_MOST_OPEN : n;
    return n > n_blocks ? n_blocks : n;
}

/* Whether the cache of a spec has fp16 pages on a GPU. A trellis search takes as long for one row
 * as for 64, so rows wait there until their block is full. Groups of several tokens need them, too.
 * The remaining words ask for exact first or newest tokens; a centre implies exact first tokens. */
static bool has_open_pages(const char *spec)
{
    static const char *const words[] = {
        "trellis", "octopus", "hqmq", "center=", "sink=", "recent="
    };

    return may_have_groups(spec) || has_word(spec, words, sizeof(words) / sizeof(words[0]));
}

bool kvp_kv_learns(const kvp_settings *settings)
{
    kvant_scheme_info info = { .size = sizeof(info) };

    kvant_scheme_get_info(settings->scheme, &info);
    return info.settings != NULL || strstr(info.k, "transform=first") != NULL;
}

size_t kvp_kv_open_bytes(const kvp_kv_shape *shape, const kvp_settings *settings)
{
    kvant_scheme_info info = { .size = sizeof(info) };

    kvant_scheme_get_info(settings->scheme, &info);
    if (!shape->in_order || (kvp_kv_exact(shape, settings, shape->n_streams).step == 0 &&
                             !has_open_pages(info.k) && !has_open_pages(info.v)))
        return 0;
    return (size_t)kvp_kv_open_pages(shape, settings) * KVANT_PAGE_TOKENS * shape->row *
           sizeof(uint16_t);
}

/* Finds the most bytes for every plausible head_dim. A GPU uses all reserved bytes, so for a GPU
 * head_dims below 64 do not count unless given: few models have one, and bits per number are
 * highest there. */
static kvant_status most_bytes(const kvp_settings *settings, const kvp_kv_shape *shape,
                               const kvant_scheme_location *location,
                               const kvant_tensor_params *params, size_t *most)
{
    const bool unknown = shape->in_order && location->head_dim == 0;
    kvant_scheme_location at = *location;
    size_t bytes;

    *most = 0;
    for (at.head_dim = LEAST_HEAD_DIM; unknown && at.head_dim <= KVANT_MAX_HEAD_DIM;
         at.head_dim += 8)
        if (shape->row % at.head_dim == 0 &&
            kvant_scheme_most_bytes(settings->scheme, &at, shape->row, params, &bytes) ==
                KVANT_OK &&
            bytes > *most)
            *most = bytes;
    return *most > 0
               ? KVANT_OK
               : kvant_scheme_most_bytes(settings->scheme, location, shape->row, params, most);
}

/* Bytes of a tensor's pages on a GPU; 0: there is no codec. */
static size_t pages_on_gpu(const kvp_settings *settings, const kvp_kv_shape *shape,
                           const kvant_tensor_params *params)
{
    const kvant_scheme_location location =
        kvp_kv_location(shape, 0, kvp_kv_known_head_dim(shape, settings));
    size_t bytes;

    if (most_bytes(settings, shape, &location, params, &bytes) != KVANT_OK)
        return 0;
    return (bytes + GPU_ALIGN - 1) / GPU_ALIGN * GPU_ALIGN + kvp_kv_open_bytes(shape, settings);
}

/* Bytes of a layer's matrices on a GPU. Without a known head_dim it counts the least one. */
static size_t matrices_on_gpu(const kvp_settings *settings, const kvp_kv_shape *shape)
{
    const uint32_t head_dim = kvp_kv_known_head_dim(shape, settings);

    return kvp_kv_learns(settings) ? 2 * (size_t)shape->row *
                                         (head_dim != 0 ? head_dim : LEAST_HEAD_DIM) * sizeof(float)
                                   : 0;
}

/* Rows in place come in steps of KVP_CELLS_PADDING cells. If less than a block is missing to the
 * next step, a tensor reserves it. With 2048 tokens this is 1 % more memory, and two batches of a
 * prompt are in place instead of one. */
static size_t round_up(const kvp_kv_shape *shape, size_t bytes)
{
    const size_t row = shape->row * sizeof(uint16_t), n = bytes / row,
                 next = (n + KVP_CELLS_PADDING - 1) / KVP_CELLS_PADDING * KVP_CELLS_PADDING;

    return next - n < KVANT_PAGE_TOKENS && next * row > bytes ? next * row : bytes;
}

/* Bytes that a tensor reserves on a GPU. A short context takes as much memory in pages, with its
 * matrices, as in f16. Then all of its cells get room in f16, so that it need not be compressed.
 * Keys and values of a layer decide together, because they are in place together. */
static size_t reserve_on_gpu(const kvp_settings *settings, const kvp_kv_shape *shape,
                             const kvant_tensor_params *params)
{
    const size_t own = pages_on_gpu(settings, shape, params),
                 f16 = (size_t)shape->n_cells * shape->row * sizeof(uint16_t);
    kvp_kv_shape other = *shape;

    if (shape->n_streams != 1 || settings->exact < shape->n_cells || own >= f16)
        return own;
    other.role = shape->role == KVANT_ROLE_K ? KVANT_ROLE_V : KVANT_ROLE_K;
    return own + pages_on_gpu(settings, &other, params) + matrices_on_gpu(settings, shape) >=
                   2 * f16
               ? f16
               : round_up(shape, own);
}

size_t kvp_kv_reserve_with(const kvp_settings *settings, const kvp_kv_shape *shape, char *err,
                           size_t errlen)
{
    kvant_scheme_location location;
    kvant_tensor_params params;
    kvant_exact_part part;
    size_t bytes;

    if (!kvp_kv_tensor_params(shape, settings, &params, &part, err, errlen))
        return 0;
    if (shape->latents) {
        location = kvp_kv_location(shape, 0, KVP_MLA_PART);
        bytes = kvp_mla_most_bytes(settings, &location, shape->row, &params);
        if (bytes == 0)
            snprintf(err, errlen, "the codec does not support latents: %s", kvant_error_message());
        return bytes;
    }
    if (settings->head_dim != 0 && shape->row % settings->head_dim != 0) {
        snprintf(err, errlen,
                 "KVANT_HEAD_DIM=%u does not divide rows of %u values; unset it, or set it to the "
                 "head_dim of the model",
                 settings->head_dim, shape->row);
        return 0;
    }
    location = kvp_kv_location(shape, 0, kvp_kv_known_head_dim(shape, settings));
    if (most_bytes(settings, shape, &location, &params, &bytes) == KVANT_OK)
        return shape->in_order ? reserve_on_gpu(settings, shape, &params) : bytes;
    snprintf(err, errlen, "%s", kvant_error_message());
    return 0;
}
