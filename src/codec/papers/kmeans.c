/* kmeans.c - `kmeans` (SAW-INT4, appendix A.2): the nearest of c calibrated centroids, and the
 * remainder as asymmetric int per token. format.md, "Centroids", has the formulas.
 *
 * Everything happens in the transformed space. Centroids are rotated once, at creation; a rotation
 * does not change distances. uniform.c quantises the remainder. */
#include <string.h>

#include "../../base/alloc.h"
#include "../calibrated.h"
#include "../uniform.h"

typedef struct kmeans {
    kvant_uniform uniform; /* has to be the first member: uniform.c finds it as the codec's state */
    const kvant_quantizer *residual;
    uint32_t clusters;
    size_t index_offset; /* in the page */
    /* The centroids again, head_dim x clusters, behind the centroids. With this order the loop over
     * all centroids of a row needs no gathers. */
    float *columns;
    float centroids[]; /* clusters x head_dim */
} kmeans;

/* Bits of a token's index, in whole bytes. Pages end on multiples of 64 bytes, so fewer bits would
 * save nothing. */
static uint32_t index_bits(uint32_t clusters)
{
    return clusters == 1 ? 0 : clusters <= 256 ? 8 : 16;
}

static void put_index(const kmeans *k, uint8_t *page, uint32_t token, uint32_t index)
{
    uint32_t bytes = index_bits(k->clusters) / 8;
    for (uint32_t i = 0; i < bytes; i++)
        page[k->index_offset + bytes * token + i] = (uint8_t)(index >> 8 * i);
}

/* Foreign bytes may name a centroid that does not exist; they mean the first. */
static uint32_t get_index(const kmeans *k, const uint8_t *page, uint32_t token)
{
    uint32_t bytes = index_bits(k->clusters) / 8, index = 0;
    for (uint32_t i = 0; i < bytes; i++)
        index |= (uint32_t)page[k->index_offset + bytes * token + i] << 8 * i;
    return index < k->clusters ? index : 0;
}

static void add_squares(float *distances, const float *column, uint32_t n, float y)
{
    for (uint32_t c = 0; c < n; c++)
        distances[c] += (y - column[c]) * (y - column[c]);
}

/* Subtracts the nearest centroid from y; returns its index. */
static uint32_t subtract_nearest(const kvant_codec *codec, const float *y, float *rest)
{
    const kmeans *k = codec->state;
    float distances[KVANT_CALIBRATION_MAX_CLUSTERS];
    uint32_t d = codec->info.head_dim, best = 0;
    memset(distances, 0, k->clusters * sizeof *distances);
    for (uint32_t j = 0; j < d && k->clusters > 1; j++)
        add_squares(distances, k->columns + (size_t)j * k->clusters, k->clusters, y[j]);
    for (uint32_t c = 1; c < k->clusters; c++)
        best = distances[c] < distances[best] ? c : best;
    for (uint32_t j = 0; j < d; j++)
        rest[j] = y[j] - k->centroids[(size_t)best * d + j];
    return best;
}

static kvant_status kmeans_check(const kvant_codec *codec, const kvant_kernels *kernels,
                                 const float *y)
{
    const kmeans *k = codec->state;
    float rest[KVANT_MAX_HEAD_DIM];
    subtract_nearest(codec, y, rest);
    return k->residual->check(codec, kernels, rest);
}

/* A scale of 0 means that the token was never written. So a scale that rounds to 0 is stored as the
 * smallest fp16 number. The token's codes are all the same then and decode to the zero point. */
static void kmeans_encode(const kvant_codec *codec, const kvant_kernels *kernels, const float *y,
                          uint32_t token, void *page)
{
    const kmeans *k = codec->state;
    float rest[KVANT_MAX_HEAD_DIM];
    uint32_t index = subtract_nearest(codec, y, rest);
    k->residual->encode(codec, kernels, rest, token, page);
    put_index(k, page, token, index);
    uint16_t *scale = kvant_codec_metadata(codec, page) + token;
    *scale = *scale ? *scale : 1;
}

static void kmeans_decode(const kvant_codec *codec, const kvant_kernels *kernels, const void *page,
                          uint32_t token, float *y)
{
    const kmeans *k = codec->state;
    uint32_t d = codec->info.head_dim;
    if (kvant_codec_metadata_of(codec, page)[token] == 0) {
        memset(y, 0, d * sizeof *y);
        return;
    }
    const float *centroid = k->centroids + (size_t)get_index(k, page, token) * d;
    k->residual->decode(codec, kernels, page, token, y);
    for (uint32_t j = 0; j < d; j++)
        y[j] += centroid[j];
}

static const kvant_quantizer kmeans_quantizer = { kmeans_check, kmeans_encode, kmeans_decode,
                                                  kvant_unpack_decoded };

/* Finds the rows of the c centroids in the calibration; a single centroid is the mean. */
static kvant_status find_centroids(const kvant_codec *codec, const kvant_location *location,
                                   uint32_t clusters, const float **centroids,
                                   const kvant_error *error)
{
    kvant_calibration_entry entry;
    kvant_calibration_info info = { .size = sizeof info };
    char list[128] = "1";
    KVANT_FORWARD(
        kvant_calibrated_entry(codec, location, codec->info.role, "kmeans", &entry, error));
    KVANT_FORWARD(kvant_calibration_get_info(location->calibration, &info));
    *centroids = clusters == 1 ? entry.mean : NULL;
    for (uint32_t i = 0; i < info.n_codebooks; i++) {
        if (info.clusters[i] == clusters)
            *centroids = entry.centroids[i];
        kvant_append(list, sizeof list, ", %u", (unsigned)info.clusters[i]);
    }
    if (*centroids)
        return KVANT_OK;
    return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                      "the calibration has no set of %u centroids, only c=%s: make it again with "
                      "kvant calibrate --clusters %u",
                      (unsigned)clusters, list, (unsigned)clusters);
}

/* Rotates the centroids and checks that their numbers are small enough: the residual of an ordinary
 * row then fits fp16. */
static kvant_status place_centroids(const kvant_codec *codec, kmeans *k, const float *centroids,
                                    const kvant_error *error)
{
    const kvant_kernels *kernels = kvant_kernels_get(KVANT_CPU_AUTO);
    uint32_t d = codec->info.head_dim;
    k->columns = k->centroids + (size_t)k->clusters * d;
    for (uint32_t c = 0; c < k->clusters; c++) {
        float *row = k->centroids + (size_t)c * d;
        kvant_transform_forward(&codec->transform, kernels, NULL, centroids + (size_t)c * d, row);
        for (uint32_t j = 0; j < d; j++) {
            if (!(fabsf(row[j]) <= KVANT_HALF_MAX / 2))
                return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                                  "centroids of the calibration are beyond half of fp16's range: "
                                  "use another codec");
            k->columns[(size_t)j * k->clusters + c] = row[j];
        }
    }
    return KVANT_OK;
}

/* Makes the uniform codec, which is complete already, quantise the residual that centroids
 * leave. */
static kvant_status add_centroids(kvant_codec *codec, uint32_t clusters, const float *centroids,
                                  const kvant_error *error)
{
    size_t floats = 2 * (size_t)clusters * codec->info.head_dim;
    kmeans *k = kvant_alloc(1, sizeof *k + floats * sizeof(float));
    KVANT_RETURN_IF(!k, KVANT_ERR_MEMORY);
    k->uniform = *kvant_uniform_of(codec);
    k->residual = codec->quantizer;
    k->clusters = clusters;
    k->index_offset = codec->info.metadata_offset + codec->info.metadata_bytes;
    kvant_codec_identify(codec, centroids, floats / 2 * sizeof *centroids);
    kvant_free(codec->state);
    codec->state = k;
    codec->quantizer = &kmeans_quantizer;
    /* a reader that took the pages for uniform codes would miss the centroids */
    codec->view.kind = KVANT_CODES_NONE;
    codec->product.lines = NULL;
    kvant_codec_set_page(codec, codec->info.bits, codec->info.code_bytes,
                         codec->info.metadata_bytes + index_bits(clusters) * KVANT_PAGE_TOKENS / 8);
    KVANT_FORWARD(place_centroids(codec, k, centroids, error));
    kvant_general_view *view = &codec->view.general;
    kvant_codec_set_tables(codec, sizeof *k + floats * sizeof(float));
    view->uniform.clusters = clusters;
    view->uniform.centroids = kvant_codec_table_offset(codec, k->centroids);
    view->uniform.columns = kvant_codec_table_offset(codec, k->columns);
    view->uniform.index = (uint32_t)k->index_offset;
    view->uniform.index_bytes = index_bits(clusters) / 8;
    return KVANT_OK;
}

typedef struct kmeans_options {
    int32_t c, group;
} kmeans_options;

static const kvant_option table[] = {
    KVANT_NUMBER(kmeans_options, c, 1, KVANT_CALIBRATION_MAX_CLUSTERS, 256, "centroids"),
    KVANT_GROUP_OPTION(kmeans_options),
    { .key = NULL },
};

static kvant_status create_kmeans(kvant_codec *codec, const kvant_request *request,
                                  const kvant_error *error)
{
    /* Only block=N asks for a rotation. Without it rows stay unrotated, as in the paper. */
    const kvant_rotate rotate =
        request->common->block == KVANT_OPTION_ABSENT ? KVANT_ROTATE_NONE : KVANT_ROTATE_HADAMARD;
    kmeans_options o = *(const kmeans_options *)request->options;
    const float *centroids;
    uint32_t bits;
    KVANT_FORWARD(kvant_spec_bits(request->spec, 2, 8, &bits, error));
    KVANT_FORWARD(kvant_codec_set_transform(codec, request, KVANT_TRANSFORM_BLOCKS(rotate), error));
    KVANT_FORWARD(find_centroids(codec, request->location, (uint32_t)o.c, &centroids, error));
    KVANT_FORWARD(
        kvant_uniform_init(codec, bits, KVANT_UNIFORM_ASYM, false, (uint32_t)o.group, error));
    KVANT_FORWARD(add_centroids(codec, (uint32_t)o.c, centroids, error));
    o.group = (int32_t)kvant_uniform_of(codec)->group;
    kvant_codec_describe(codec, table, &o, "%s-%u", request->spec->name, (unsigned)bits);
    return KVANT_OK;
}

/* Centroids are calibrated for rows without a centre, a scale or a matrix. */
KVANT_FAMILY(kmeans, "2 3 4 5 6 7 8", "SAW-INT4, appendix A.2",
             "nearest of c centroids, then per-token int of what it leaves; needs a calibration",
             table, kvant_common_options_uncentred, create_kmeans)
