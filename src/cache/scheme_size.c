/* scheme_size.c - how many bytes a tensor of a scheme takes before its head dimension is known, and
 * which of its tokens are exact (kvant/scheme.h). scheme.c chooses the codecs. */
#include <kvant/scheme.h>

#include "../base/abi.h"
#include "../base/attributes.h"
#include "../base/error.h"
#include "../store/rules.h"

/* The head dimensions to reserve for: models use multiples of 8 from 16 on. A smaller one would
 * reserve memory for metadata that no model stores. */
#define MIN_HEAD_DIM 16u
#define HEAD_DIM_STEP 8u

#define EXACT_LEAST (KVANT_EXACT_FIRST + KVANT_EXACT_LEAST_NEWEST)
#define EXACT_OWN (KVANT_EXACT_FIRST + KVANT_EXACT_NEWEST)

static kvant_status bytes_at(kvant_scheme *scheme, const kvant_scheme_location *location,
                             const kvant_tensor_params *params, size_t *bytes)
{
    kvant_tensor_params p = *params;
    KVANT_FORWARD(kvant_scheme_codecs(scheme, location, &p.codecs));
    p.n_kv_heads = location->n_kv_heads;
    return kvant_tensor_size(&p, bytes);
}

/* The most bytes for one head_dim: the maximum of an ordinary layer and, if the layer may be
 * protected, a protected one. */
static kvant_status most_bytes_at(kvant_scheme *scheme, kvant_scheme_location location,
                                  const kvant_tensor_params *params, size_t *most)
{
    kvant_scheme_info info = { .size = sizeof info };
    size_t bytes;
    KVANT_FORWARD(kvant_scheme_get_info(scheme, &info));
    KVANT_FORWARD(bytes_at(scheme, &location, params, &bytes));
    *most = bytes > *most ? bytes : *most;
    if (!info.protect || location.n_layers)
        return KVANT_OK;
    location.n_layers = location.layer + 1; /* as the last layer it is protected */
    KVANT_FORWARD(bytes_at(scheme, &location, params, &bytes));
    *most = bytes > *most ? bytes : *most;
    return KVANT_OK;
}

kvant_status kvant_scheme_most_bytes(kvant_scheme *scheme, const kvant_scheme_location *location,
                                     uint32_t row_dim, const kvant_tensor_params *params,
                                     size_t *bytes)
{
    kvant_scheme_location p;
    kvant_tensor_params t;
    size_t most = 0;
    kvant_status status = KVANT_OK;
    if (!scheme || !KVANT_ACCEPT_STRUCT(kvant_scheme_location, &p, location, head_dim))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "scheme: scheme or location is NULL, or the size field of location is "
                          "not set to sizeof(kvant_scheme_location)");
    if (p.role != KVANT_ROLE_K && p.role != KVANT_ROLE_V)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "scheme: role is neither KVANT_ROLE_K nor KVANT_ROLE_V");
    if (!bytes || !row_dim || !KVANT_ACCEPT_STRUCT(kvant_tensor_params, &t, params, n_open_blocks))
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "scheme: params or bytes is NULL, row_dim is 0, or the size field of "
                          "params is not set to sizeof(kvant_tensor_params)");
    if (!p.head_dim)
        KVANT_FORWARD(kvant_scheme_head_dim(scheme, p.layer, p.role, &p.head_dim));
    const uint32_t first = p.head_dim ? p.head_dim : MIN_HEAD_DIM,
                   last = p.head_dim ? p.head_dim : KVANT_MAX_HEAD_DIM;
    for (uint32_t head_dim = first; head_dim <= last; head_dim += HEAD_DIM_STEP) {
        if (row_dim % head_dim)
            continue;
        p.head_dim = head_dim;
        p.n_kv_heads = row_dim / head_dim;
        status = most_bytes_at(scheme, p, &t, &most);
    }
    if (!most && status != KVANT_OK)
        return status; /* every head_dim that divides the row failed; this is the last error */
    if (!most)
        return kvant_fail(NULL, KVANT_ERR_ARGUMENT,
                          "no head_dim up to %u divides row_dim %u: set head_dim",
                          KVANT_MAX_HEAD_DIM, row_dim);
    *bytes = most;
    return KVANT_OK;
}

kvant_status kvant_scheme_exact(const kvant_scheme *scheme, uint64_t max_tokens,
                                uint32_t n_sequences, kvant_exact_part *part)
{
    kvant_scheme_info info = { .size = sizeof info };
    KVANT_RETURN_IF(!scheme || !n_sequences, KVANT_ERR_ARGUMENT);
    KVANT_FORWARD(kvant_scheme_get_info(scheme, &info));
    kvant_exact_part full = { .size = sizeof full };
    /* In a short context fp16 rows of 512 tokens would take more than all codes: with 1024 tokens a
     * preset would be larger than f16. */
    const uint64_t step = max_tokens / 8 / KVANT_PAGE_TOKENS * KVANT_PAGE_TOKENS;
    if (info.preset || info.settings) {
        const uint64_t share = max_tokens / 16, most = share > EXACT_LEAST ? share : EXACT_LEAST;
        const uint64_t own = most < EXACT_OWN ? most : EXACT_OWN, all = n_sequences * own;
        const uint64_t some = all < most ? all : most, total = some < INT32_MAX ? some : INT32_MAX;
        full = (kvant_exact_part){ sizeof full, KVANT_EXACT_FIRST,
                                   (uint32_t)own - KVANT_EXACT_FIRST, (uint32_t)total,
                                   step < KVANT_EXACT_LEAST_STEP ? KVANT_EXACT_LEAST_STEP
                                   : step > KVANT_EXACT_STEP     ? KVANT_EXACT_STEP
                                                                 : (uint32_t)step };
    }
    return KVANT_RETURN_STRUCT(kvant_exact_part, part, &full, step) ? KVANT_OK : KVANT_ERR_ARGUMENT;
}
