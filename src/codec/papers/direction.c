/* direction.c - see direction.h. format.md, "Direction codes", has formulas and rounding. */
#include "direction.h"

#include <math.h>
#include <string.h>

#include "../../base/half.h"
#include "../../math/sums.h"

#define MAX_SLOTS 16u /* of a token; at head_dim 512 they take 2 bits per number */

/* The chunks of a token that have slots, the largest first. */
typedef struct token_outliers {
    uint32_t n, chunk[MAX_SLOTS];
} token_outliers;

uint32_t kvant_direction_closest_unit(const float y[4])
{
    uint32_t largest = 0, signs = 0;
    for (uint32_t i = 0; i < 4; i++) {
        largest = fabsf(y[i]) > fabsf(y[largest]) ? i : largest;
        signs |= (uint32_t)(y[i] < 0) << i;
    }
    const float half = ((fabsf(y[0]) + fabsf(y[1])) + (fabsf(y[2]) + fabsf(y[3]))) * 0.5f;
    return fabsf(y[largest]) >= half ? 2 * largest + (y[largest] < 0) : 8 + signs;
}

void kvant_direction_split(const kvant_direction *direction, const float *y, uint32_t head_dim,
                           kvant_direction_row *r)
{
    for (uint32_t i = 0; i < 4; i++) {
        float *x = r->x + (size_t)i * KVANT_DIRECTION_MAX_CHUNKS;
        for (uint32_t c = 0; c < direction->padded_chunks; c++)
            x[c] = 4 * c + i < head_dim ? y[4 * c + i] : 0;
    }
    const float *x = r->x;
    const size_t stride = KVANT_DIRECTION_MAX_CHUNKS;
    for (uint32_t c = 0; c < direction->padded_chunks; c++) {
        const float a = x[c], b = x[stride + c], e = x[2 * stride + c], f = x[3 * stride + c];
        r->squares[c] = (a * a + b * b) + (e * e + f * f);
        r->norm[c] = sqrtf(r->squares[c]);
    }
    r->largest = 0;
}

/* The lower median, by insertion: there are at most 128. */
static float median(const float *x, uint32_t n)
{
    float sorted[KVANT_DIRECTION_MAX_CHUNKS];
    for (uint32_t i = 0; i < n; i++) {
        uint32_t j = i;
        for (; j > 0 && sorted[j - 1] > x[i]; j--)
            sorted[j] = sorted[j - 1];
        sorted[j] = x[i];
    }
    return sorted[(n - 1) / 2];
}

/* The largest chunks above the threshold get the slots of the token; chunks without a slot stay
 * ordinary. An outlier's norm becomes 0, so that it does not count for the radius scale. */
static token_outliers extract_outliers(const kvant_direction *direction, kvant_direction_row *r)
{
    token_outliers out = { .n = 0 };
    if (direction->slots == 0)
        return out;
    const float threshold = direction->multiple * median(r->norm, direction->n_chunks);
    while (out.n < direction->slots) {
        uint32_t largest = 0;
        for (uint32_t c = 1; c < direction->n_chunks; c++)
            largest = r->norm[c] > r->norm[largest] ? c : largest;
        if (!(r->norm[largest] > threshold))
            break;
        r->norm[largest] = r->squares[largest] = 0;
        out.chunk[out.n++] = largest;
    }
    return out;
}

/* Rounds half to even, for 0 <= x < 2^22: the added number leaves no bits for a fraction. Unlike
 * rintf this is never a call. */
static float round_small(float x)
{
    return (x + 8388608.0f) - 8388608.0f;
}

/* Chooses the radius codes; returns the step between two radii. */
static float quantize_radii(const kvant_direction *direction, kvant_direction_row *r)
{
    const float top = (float)((1u << direction->radius_bits) - 1);
    for (uint32_t c = 0; c < direction->n_chunks; c++)
        r->largest = r->norm[c] > r->largest ? r->norm[c] : r->largest;
    const float step = kvant_half_to_float(kvant_half_from_float(r->largest / top));
    const float inverse = step > 0 ? 1 / step : 0;
    for (uint32_t c = 0; c < direction->n_chunks; c++) {
        const float level = round_small(r->norm[c] * inverse);
        r->radius[c] = level < top ? level : top;
    }
    return step;
}

/* The step with which the coded chunks keep their <y, y>. Chunks of radius 0 do not count:
 * enlarging the coded chunks to make up for them would only add error. */
static float unbiased_step(const kvant_direction *direction, const kvant_direction_row *r)
{
    const size_t stride = KVANT_DIRECTION_MAX_CHUNKS;
    float coded[KVANT_DIRECTION_MAX_CHUNKS], product[KVANT_DIRECTION_MAX_CHUNKS];
    for (uint32_t c = 0; c < direction->n_chunks; c++) {
        const float *x = r->x + c, *w = direction->codewords + (size_t)4 * r->index[c];
        coded[c] = r->radius[c] > 0 ? 1.0f : 0.0f;
        product[c] =
            (x[0] * w[0] + x[stride] * w[1]) + (x[2 * stride] * w[2] + x[3 * stride] * w[3]);
    }
    const float squares = kvant_dot_ordered(coded, r->squares, direction->n_chunks);
    const float products = kvant_dot_ordered(r->radius, product, direction->n_chunks);
    return products > 0 ? squares / products : 0;
}

float kvant_direction_quantize(const kvant_direction *direction, const kvant_kernels *kernels,
                               kvant_direction_row *r)
{
    const float step = quantize_radii(direction, r);
    direction->search(direction, kernels, r->x, direction->padded_chunks, r->index);
    return direction->unbiased && step > 0 ? unbiased_step(direction, r) : step;
}

/* Quantises a row without storing it; returns the scale to store. */
static float quantize(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                      kvant_direction_row *r, token_outliers *out)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    kvant_direction_split(direction, y, codec->info.head_dim, r);
    *out = extract_outliers(direction, r);
    return kvant_direction_quantize(direction, kernels, r);
}

static kvant_status direction_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                    const float *y)
{
    kvant_direction_row r;
    token_outliers out;
    for (uint32_t j = 0; j < codec->info.head_dim; j++)
        KVANT_RETURN_IF(!(fabsf(y[j]) <= KVANT_HALF_MAX), KVANT_ERR_RANGE);
    return quantize(codec, kernels, y, &r, &out) <= KVANT_HALF_MAX ? KVANT_OK : KVANT_ERR_RANGE;
}

/* The index of the first of the 4 numbers of a token's outlier, among the halves of the
 * metadata. */
static size_t outlier_at(uint32_t slot, uint32_t token)
{
    return KVANT_PAGE_TOKENS + ((size_t)slot * KVANT_PAGE_TOKENS + token) * 4;
}

/* Stores the outliers. Free slots are zeroed, because the bytes of a token must not depend on its
 * earlier content. */
static void store_outliers(const kvant_direction *direction, const kvant_direction_row *r,
                           const token_outliers *out, uint32_t token, uint16_t *metadata,
                           uint32_t *codes)
{
    for (uint32_t slot = 0; slot < direction->slots; slot++)
        for (uint32_t i = 0; i < 4; i++) {
            const size_t at = (size_t)i * KVANT_DIRECTION_MAX_CHUNKS;
            metadata[outlier_at(slot, token) + i] =
                slot < out->n ? kvant_half_from_float(r->x[at + out->chunk[slot]]) : 0;
        }
    for (uint32_t slot = 0; slot < out->n; slot++)
        codes[out->chunk[slot]] = direction->n_codewords | slot << direction->index_bits;
}

static void direction_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                             uint32_t token, void *page)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    uint32_t codes[KVANT_DIRECTION_MAX_CHUNKS];
    kvant_direction_row r;
    token_outliers out;
    kvant_codec_metadata(codec, page)[token] =
        kvant_half_from_float(quantize(codec, kernels, y, &r, &out));
    for (uint32_t c = 0; c < direction->n_chunks; c++)
        codes[c] = r.index[c] | (uint32_t)r.radius[c] << direction->index_bits;
    store_outliers(direction, &r, &out, token, kvant_codec_metadata(codec, page), codes);
    kvant_chunk_layout_put(&direction->layout, page, token, codes);
}

/* The numbers of a chunk. Index n_codewords means a slot. Encoders never write a larger index or a
 * slot that does not exist; both decode to zeros. */
static void decode_chunk(const kvant_direction *direction, const uint16_t *metadata, uint32_t token,
                         uint32_t code, float chunk[4])
{
    const uint32_t index = code & ((1u << direction->index_bits) - 1),
                   above = code >> direction->index_bits;
    if (index == direction->n_codewords && above < direction->slots) {
        for (uint32_t i = 0; i < 4; i++)
            chunk[i] = kvant_half_to_float(metadata[outlier_at(above, token) + i]);
        return;
    }
    const float radius = kvant_half_to_float(metadata[token]) * (float)above;
    for (uint32_t i = 0; i < 4; i++)
        chunk[i] = radius * direction->codewords[(size_t)4 * index + i];
}

static void direction_decode(const kvant_codec *codec, const kvant_kernels *kernels,
                             const void *page, uint32_t token, float *y)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    uint32_t codes[KVANT_DIRECTION_MAX_CHUNKS];
    float decoded[KVANT_MAX_HEAD_DIM];
    (void)kernels;
    kvant_chunk_layout_get(&direction->layout, page, token, codes);
    for (uint32_t c = 0; c < direction->n_chunks; c++)
        decode_chunk(direction, kvant_codec_metadata_of(codec, page), token, codes[c],
                     decoded + (size_t)4 * c);
    memcpy(y, decoded, codec->info.head_dim * sizeof *y);
}

static void direction_unpack(const kvant_codec *codec, const kvant_kernels *kernels,
                             const void *page, float *tile)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    const kvant_direction_book book = { direction->codewords, direction->n_codewords,
                                        direction->index_bits, direction->slots };
    const uint16_t *metadata = kvant_codec_metadata_of(codec, page);
    _Alignas(64) float scale[KVANT_PAGE_TOKENS];
    kernels->token_halves(metadata, scale);
    kernels->unpack_directions(&book, &direction->layout, page, scale, metadata + KVANT_PAGE_TOKENS,
                               codec->info.head_dim, tile);
}

static const kvant_quantizer direction_quantizer = { direction_check, direction_encode,
                                                     direction_decode, direction_unpack };

/* Reads one letter or word and its number, and moves *text behind them. */
static bool read_field(const char **text, const kvant_direction_field *field, uint32_t *number)
{
    const size_t length = strlen(field->name);
    uint32_t value = 0, digits = 0;
    if (strncmp(*text, field->name, length) != 0)
        return false;
    const char *at = *text + length;
    for (; *at >= '0' && *at <= '9' && digits < 6; digits++)
        value = value * 10 + (uint32_t)(*at++ - '0');
    if (digits == 0 || value < field->min || value > field->max)
        return false;
    *text = at;
    *number = value;
    return true;
}

kvant_status kvant_direction_variant(const kvant_spec *spec, const kvant_direction_field fields[2],
                                     uint32_t numbers[2], const kvant_error *error)
{
    const uint32_t a = numbers[0], b = numbers[1];
    const char *text = spec->variant;
    if (!text || (read_field(&text, &fields[0], &numbers[0]) &&
                  read_field(&text, &fields[1], &numbers[1]) && !*text))
        return KVANT_OK;
    return kvant_fail(error, KVANT_ERR_SPEC,
                      "%s-%s is not valid: use %s-%sN%sM with N from %u to %u and M from %u to %u, "
                      "as in %s-%s%u%s%u",
                      spec->name, spec->variant, spec->name, fields[0].name, fields[1].name,
                      (unsigned)fields[0].min, (unsigned)fields[0].max, (unsigned)fields[1].min,
                      (unsigned)fields[1].max, spec->name, fields[0].name, (unsigned)a,
                      fields[1].name, (unsigned)b);
}

/* The codes that name slots are the indices behind the codewords, with any radius. */
static kvant_status resolve_page(kvant_direction *direction, kvant_direction_options *o,
                                 const kvant_error *error)
{
    const uint32_t spare = (1u << direction->index_bits) - direction->n_codewords;
    KVANT_FORWARD(kvant_outlier_pool_resolve(&direction->pool, o->med, o->slots,
                                             spare << direction->radius_bits, "hqmq", error));
    o->slots = (int32_t)direction->pool.slots;
    direction->range_all = o->range == 1;
    return KVANT_OK;
}

/* A token has slots for one chunk in 16, unless the spec says otherwise. A slot takes 64 bits, so
 * this is one bit per number for the usual head_dims. */
static kvant_status resolve_token(const kvant_codec *codec, kvant_direction *direction,
                                  kvant_direction_options *o, const kvant_error *error)
{
    const int32_t most =
        direction->radius_bits < 4 ? 1 << direction->radius_bits : (int32_t)MAX_SLOTS;
    const int32_t usual = ((int32_t)direction->n_chunks + 15) / 16;
    if (o->range == 1)
        return kvant_fail(error, KVANT_ERR_SPEC, "range=all needs median=page: add it to the spec");
    if (o->slots > most)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "slots=%d is not valid for hqmq: use a number from 1 to %d",
                          (int)o->slots, (int)most);
    if (o->slots == KVANT_OPTION_ABSENT)
        o->slots = usual < most ? usual : most;
    direction->multiple = (float)o->med;
    direction->slots = (uint32_t)o->slots;
    if (direction->slots > direction->n_chunks)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "slots=%u is too large: head_dim %u has only %u chunks of 4 channels",
                          (unsigned)direction->slots, (unsigned)codec->info.head_dim,
                          (unsigned)direction->n_chunks);
    return KVANT_OK;
}

/* med3 is med=3. */
static kvant_status resolve_outliers(const kvant_codec *codec, kvant_direction *direction,
                                     kvant_direction_options *o, const kvant_error *error)
{
    const bool asked = o->slots != KVANT_OPTION_ABSENT || o->median == 1 || o->range == 1;
    if (o->med3 && o->med != KVANT_OPTION_ABSENT)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "med3 and med=%d exclude each other: leave one of them out", (int)o->med);
    if (asked && !o->med3 && o->med == KVANT_OPTION_ABSENT)
        return kvant_fail(error, KVANT_ERR_SPEC,
                          "slots, median and range need med3 or med=N: add it to the spec");
    if (o->med3)
        o->med = 3;
    o->med3 = 0;
    if (o->med == KVANT_OPTION_ABSENT)
        return KVANT_OK;
    direction->pool =
        (kvant_outlier_pool){ .head_dim = codec->info.head_dim, .n_chunks = direction->n_chunks };
    return o->median == 1 ? resolve_page(direction, o, error)
                          : resolve_token(codec, direction, o, error);
}

/* The paper's count: fractional fields, one fp16 number per token, and with outliers its formula
 * (2), where p is the share of chunks that there is room for. */
static double nominal_bits(const kvant_direction *direction, double code_bits, uint32_t head_dim)
{
    double slots = direction->slots + direction->pool.slots / (double)KVANT_PAGE_TOKENS;
    double share = slots / direction->n_chunks;
    double plain = (code_bits * direction->n_chunks + 16) / head_dim;
    return share > 0 ? (1 - share) * plain + share * 16 + 0.25 : plain;
}

static uint32_t bits_for(uint32_t n)
{
    uint32_t bits = 0;
    while (1u << bits < n)
        bits++;
    return bits;
}

static void set_page(kvant_codec *codec, const kvant_direction_shape *shape)
{
    kvant_direction *direction = codec->state;
    const uint32_t bits = direction->index_bits + direction->radius_bits,
                   channel_bits = bits / 4 ? bits / 4 : 1;
    kvant_chunk_layout_init(&direction->layout, codec->info.role, direction->n_chunks, bits);
    kvant_layout_init(&codec->layout, codec->info.role, codec->info.head_dim,
                      0); /* for the order of unpacked tiles */
    for (uint32_t j = 0; codec->info.role == KVANT_ROLE_V && j < codec->layout.padded_dim; j++)
        kvant_layout_move_row(&codec->layout, j, j);
    kvant_codec_set_page(codec, channel_bits, direction->layout.code_bytes,
                         sizeof(uint16_t) *
                             (KVANT_PAGE_TOKENS * (1 + 4 * (size_t)direction->slots) +
                              4 * (size_t)direction->pool.slots));
    if (direction->pool.slots)
        codec->info.block_tokens = KVANT_PAGE_TOKENS;
    codec->info.nominal_bits = nominal_bits(direction, shape->code_bits, codec->info.head_dim);
}

static void set_general_view(kvant_codec *codec, kvant_direction_search_kind search)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    kvant_general_view *view = &codec->view.general;
    view->kind = KVANT_GENERAL_DIRECTIONS;
    view->unbiased = direction->unbiased;
    view->chunks.n = direction->n_chunks;
    view->chunks.index_bits = direction->index_bits;
    view->chunks.length_bits = direction->radius_bits;
    view->chunks.slots = direction->slots;
    view->chunks.n_codewords = direction->n_codewords;
    view->chunks.codewords = kvant_codec_table_offset(codec, direction->codewords);
    view->chunks.table = kvant_codec_table_offset(codec, direction->table);
    view->chunks.pool = direction->pool.slots;
    view->chunks.whole_range = direction->range_all;
    view->chunks.multiple = direction->pool.slots ? direction->pool.multiple : direction->multiple;
    view->chunks.search = search;
}

static void set_view(kvant_codec *codec)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    codec->view.kind = KVANT_CODES_CHUNK;
    codec->view.of.chunk = (kvant_chunk_view){ .n_chunks = direction->n_chunks,
                                               .index_bits = direction->index_bits,
                                               .length_bits = direction->radius_bits,
                                               .outliers = direction->slots + direction->pool.slots,
                                               .codewords = direction->codewords };
}

kvant_status kvant_direction_create(kvant_codec *codec, const kvant_request *request,
                                    kvant_direction_options *options,
                                    const kvant_direction_shape *shape, const kvant_error *error)
{
    const kvant_transform_defaults defaults = { KVANT_ROTATE_NONE, KVANT_MAX_HEAD_DIM, true };
    const uint32_t d = codec->info.head_dim, index_bits = bits_for(shape->n_codewords);
    const size_t numbers = ((size_t)4 << index_bits) + shape->table_floats;
    KVANT_FORWARD(kvant_codec_set_transform(codec, request, defaults, error));
    KVANT_FORWARD(
        kvant_codec_alloc_state(codec, sizeof(kvant_direction) + numbers * sizeof(float)));
    codec->accepts_seed = true;
    kvant_direction *direction = codec->state;
    direction->n_chunks = (d + 3) / 4;
    direction->padded_chunks = (direction->n_chunks + KVANT_DIRECTION_LANES - 1) /
                               KVANT_DIRECTION_LANES * KVANT_DIRECTION_LANES;
    direction->n_codewords = shape->n_codewords;
    direction->index_bits = index_bits;
    direction->radius_bits = shape->radius_bits;
    direction->unbiased = options->scale == KVANT_SCALE_UNBIASED;
    direction->search = shape->search;
    direction->codewords = (float *)(direction + 1);
    direction->table = direction->codewords + ((size_t)4 << index_bits);
    KVANT_FORWARD(resolve_outliers(codec, direction, options, error));
    codec->quantizer =
        direction->pool.slots ? &kvant_direction_page_quantizer : &direction_quantizer;
    set_page(codec, shape);
    set_view(codec);
    kvant_codec_set_tables(codec, sizeof(kvant_direction) + numbers * sizeof(float));
    set_general_view(codec, shape->searches_by);
    return KVANT_OK;
}

/* Outliers are no product of a length and a direction. */
kvant_status kvant_direction_offer_codes(kvant_codec *codec)
{
    const kvant_direction *direction = kvant_direction_of(codec);
    if (direction->slots || direction->pool.slots)
        return KVANT_OK;
    return kvant_codec_offer_directions(codec, &direction->layout, direction->index_bits,
                                        direction->codewords);
}
