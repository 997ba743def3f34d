/* kivi.c - `kivi-2`, `kivi-4` (KIVI, as InnerQ's section 5 sets it up): asymmetric groups across the
 * dimension that attention sums over, so tokens of a channel for K and channels of a token for V, behind a
 * window of recent tokens in fp16.
 *
 * The quantiser is uniform.c's, the window the cache's. */
#include <stdio.h>

#include "../uniform.h"

static kvant_status create_kivi(kvant_codec *codec, kvant_spec *spec, const kvant_site *site,
                                const kvant_error *error)
{
    static const kvant_transform_defaults defaults = { KVANT_ROTATE_NONE, 128, false };
    uint32_t bits, group = 32;
    KVANT_FORWARD(kvant_spec_bits(spec, 2, 8, &bits, error));
    KVANT_FORWARD(kvant_uniform_read_group(spec, &group, error));
    KVANT_FORWARD(
        kvant_transform_create(&codec->transform, spec, &defaults, codec->info.head_dim, site->seed, error));
    KVANT_FORWARD(
        kvant_uniform_init(codec, bits, KVANT_UNIFORM_ASYM, codec->info.role == KVANT_ROLE_K, group, error));
    codec->info.nominal_bits = kvant_uniform_nominal_bits(codec);
    codec->info.recent_tokens = 128;
    snprintf(codec->spec, sizeof codec->spec, "kivi-%u:group=%u", (unsigned)bits, (unsigned)group);
    kvant_transform_describe(&codec->transform, codec->spec, sizeof codec->spec);
    return KVANT_OK;
}

const kvant_family kvant_family_kivi = {
    { sizeof(kvant_codec_family), "kivi", "2 3 4 5 6 7 8", "group=16|32|64", KVANT_TRANSFORM_OPTIONS,
      "KIVI, as InnerQ's section 5",
      "K per channel and V per token, asymmetric in groups of 32; recent tokens stay fp16" },
    create_kivi
};
