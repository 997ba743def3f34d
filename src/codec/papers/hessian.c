/* hessian.c - `hessian` (SAW-INT4, appendix A.3): the eigenvectors of the queries' second moment as a rotation, composed with a
 * Hadamard matrix, before asymmetric int per token. Formulas: docs/format.md, "Query basis".
 *
 * The quantiser is uniform.c's; values take the rotation of their keys, as in the paper. */
#include <stdio.h>

#include "../../base/alloc.h"
#include "../../math/eigen.h"
#include "../site.h"
#include "../uniform.h"

typedef struct choices {
    int eigen_first; /* which of the two rotations acts on rows first */
    int per_layer;   /* whose queries count: the kv head's or the layer's */
} choices;

static const char *const order_names[] = { "hadamard", "eigen", NULL };
static const char *const pool_names[] = { "head", "layer", NULL };

/* Adds the moment of a kv head of this layer; false when there is no such head. */
static bool add_moment(const kvant_site *site, uint32_t kv_head, uint32_t d, double *moment)
{
    kvant_calibration_entry entry = { .size = sizeof entry };
    if (kvant_calibration_get_entry(site->calibration, site->layer, kv_head, KVANT_ROLE_K, &entry) != KVANT_OK)
        return false;
    for (size_t i = 0; i < (size_t)d * d; i++)
        moment[i] += entry.query_moment[i];
    return true;
}

static kvant_status check_site(const kvant_codec *codec, const kvant_site *site, const kvant_error *error)
{
    kvant_calibration_entry own, keys = { .size = sizeof keys };
    KVANT_FORWARD(kvant_site_entry(codec, site, codec->info.role, "hessian", &own, error));
    if (kvant_calibration_get_entry(site->calibration, site->layer, site->kv_head, KVANT_ROLE_K, &keys) !=
            KVANT_OK ||
        keys.head_dim != codec->info.head_dim)
        return kvant_fail(error, KVANT_ERR_UNSUPPORTED,
                          "hessian on values takes the rotation of keys, which have another head_dim here");
    return KVANT_OK;
}

/* basis: d x d, eigenvectors as rows */
static kvant_status make_basis(const kvant_codec *codec, const kvant_site *site, const choices *c, double *moment,
                               float *basis)
{
    uint32_t d = codec->info.head_dim;
    if (!c->per_layer)
        add_moment(site, site->kv_head, d, moment);
    for (uint32_t head = 0; c->per_layer && add_moment(site, head, d, moment); head++)
        continue;
    return kvant_eigenvectors(d, moment, basis);
}

static kvant_status compose(kvant_codec *codec, const kvant_site *site, const choices *c, const kvant_error *error)
{
    uint32_t d = codec->info.head_dim;
    double *moment = kvant_alloc((size_t)d * d, sizeof *moment);
    float *basis = kvant_alloc((size_t)d * d, sizeof *basis);
    kvant_status status = moment && basis ? make_basis(codec, site, c, moment, basis) : KVANT_ERR_MEMORY;
    if (status == KVANT_OK)
        status = kvant_transform_compose(&codec->transform, basis, c->eigen_first != 0);
    kvant_free(moment);
    kvant_free(basis);
    return status == KVANT_OK ? KVANT_OK : kvant_fail(error, status, "no memory for the rotation of hessian");
}

static kvant_status create_hessian(kvant_codec *codec, kvant_spec *spec, const kvant_site *site,
                                   const kvant_error *error)
{
    static const kvant_transform_defaults defaults = { KVANT_ROTATE_HADAMARD, 128, false };
    uint32_t bits, group = 0;
    choices c = { 0, 0 };
    KVANT_FORWARD(kvant_spec_bits(spec, 2, 8, &bits, error));
    KVANT_FORWARD(kvant_spec_number(spec, "group", 8, KVANT_MAX_HEAD_DIM, &group, error));
    KVANT_FORWARD(kvant_spec_choice(spec, "order", order_names, &c.eigen_first, error));
    KVANT_FORWARD(kvant_spec_choice(spec, "pool", pool_names, &c.per_layer, error));
    KVANT_FORWARD(
        kvant_transform_create(&codec->transform, spec, &defaults, codec->info.head_dim, site->seed, error));
    KVANT_FORWARD(check_site(codec, site, error));
    KVANT_FORWARD(kvant_uniform_init(codec, bits, KVANT_UNIFORM_ASYM, false, group, error));
    snprintf(codec->spec, sizeof codec->spec, "hessian-%u:group=%u,order=%s,pool=%s", (unsigned)bits,
             (unsigned)kvant_uniform_of(codec)->group, order_names[c.eigen_first], pool_names[c.per_layer]);
    kvant_transform_describe(&codec->transform, codec->spec, sizeof codec->spec);
    return compose(codec, site, &c, error);
}

const kvant_family kvant_family_hessian = {
    { sizeof(kvant_codec_family), "hessian", "2 3 4 5 6 7 8", "group=N order=hadamard|eigen pool=head|layer",
      KVANT_TRANSFORM_OPTIONS, "SAW-INT4, appendix A.3",
      "eigenvectors of the queries' second moment as rotation, then per-token int; needs a calibration" },
    create_hessian
};
