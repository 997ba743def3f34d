/* hessian.c - `hessian` (SAW-INT4, appendix A.3): asymmetric int per token behind a rotation. The
 * rotation is the eigenvectors of the queries' second moment, composed with a Hadamard matrix.
 *
 * uniform.c is the quantiser. Values take the rotation of their keys, as in the paper.
 * format.md, "Query basis", has the formulas. */
#include "../../base/alloc.h"
#include "../calibrated.h"
#include "../uniform.h"
#include "jacobi.h"

typedef struct hessian_options {
    int32_t group;
    int32_t order; /* the rotation that acts on rows first: 1 means the eigenvectors */
    int32_t pool;  /* whose queries count: 1 means the queries of the whole layer */
} hessian_options;

static const char *const order_names[] = { "hadamard", "eigen", NULL };
static const char *const pool_names[] = { "head", "layer", NULL };

static const kvant_option table[] = {
    KVANT_GROUP_OPTION(hessian_options),
    KVANT_CHOICE(hessian_options, order, order_names, 0, "the rotation that acts on rows first"),
    KVANT_CHOICE(hessian_options, pool, pool_names, 0, "whose queries count"),
    { .key = NULL },
};

/* Adds the moment of a kv head of this layer; false when there is no such head. */
static bool add_moment(const kvant_location *location, uint32_t kv_head, uint32_t d, double *moment)
{
    kvant_calibration_entry entry = { .size = sizeof entry };
    if (kvant_calibration_get_entry(location->calibration, location->layer, kv_head, KVANT_ROLE_K,
                                    &entry) != KVANT_OK)
        return false;
    for (size_t i = 0; i < (size_t)d * d; i++)
        moment[i] += entry.query_moment[i];
    return true;
}

static kvant_status check_location(const kvant_codec *codec, const kvant_location *location,
                                   const kvant_error *error)
{
    kvant_calibration_entry own, keys = { .size = sizeof keys };
    KVANT_FORWARD(
        kvant_calibrated_entry(codec, location, codec->info.role, "hessian", &own, error));
    if (kvant_calibration_get_entry(location->calibration, location->layer, location->kv_head,
                                    KVANT_ROLE_K, &keys) != KVANT_OK ||
        keys.head_dim != codec->info.head_dim)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "hessian on values uses the rotation of keys, but keys have another "
                          "head_dim in this model");
    return KVANT_OK;
}

/* basis: d x d, eigenvectors as rows */
static kvant_status make_basis(const kvant_codec *codec, const kvant_location *location,
                               const hessian_options *o, double *moment, float *basis)
{
    uint32_t d = codec->info.head_dim;
    if (!o->pool)
        add_moment(location, location->kv_head, d, moment);
    for (uint32_t head = 0; o->pool && add_moment(location, head, d, moment); head++)
        continue;
    return kvant_eigenvectors(d, moment, basis);
}

static kvant_status compose(kvant_codec *codec, const kvant_location *location,
                            const hessian_options *o)
{
    uint32_t d = codec->info.head_dim;
    double *moment = kvant_alloc((size_t)d * d, sizeof *moment);
    float *basis = kvant_alloc((size_t)d * d, sizeof *basis);
    kvant_status status =
        moment && basis ? make_basis(codec, location, o, moment, basis) : KVANT_ERR_MEMORY;
    if (status == KVANT_OK) {
        kvant_codec_identify(codec, basis, (size_t)d * d * sizeof *basis);
        status = kvant_transform_compose(&codec->transform, basis, o->order == 1);
    }
    kvant_free(moment);
    kvant_free(basis);
    return status;
}

static kvant_status create_hessian(kvant_codec *codec, const kvant_request *request,
                                   const kvant_error *error)
{
    hessian_options o = *(const hessian_options *)request->options;
    uint32_t bits;
    KVANT_FORWARD(kvant_spec_bits(request->spec, 2, 8, &bits, error));
    KVANT_FORWARD(kvant_codec_set_transform(codec, request,
                                            KVANT_TRANSFORM_BLOCKS(KVANT_ROTATE_HADAMARD), error));
    KVANT_FORWARD(check_location(codec, request->location, error));
    KVANT_FORWARD(
        kvant_uniform_init(codec, bits, KVANT_UNIFORM_ASYM, false, (uint32_t)o.group, error));
    o.group = (int32_t)kvant_uniform_of(codec)->group;
    kvant_codec_describe(codec, table, &o, "%s-%u", request->spec->name, (unsigned)bits);
    return compose(codec, request->location, &o);
}

KVANT_FAMILY(hessian, "2 3 4 5 6 7 8", "SAW-INT4, appendix A.3",
             "eigenvectors of the queries' second moment as rotation, then per-token int; needs a "
             "calibration",
             table, kvant_common_options, create_hessian)
