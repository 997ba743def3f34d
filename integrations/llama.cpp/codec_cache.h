/* codec_cache.h - one codec object for each (spec, head_dim, role, seed), shared by all layers and buffers,
 * and for specs that need a calibration one for each kv head of each layer.
 *
 * Codecs are immutable and may cost tables to create; a model has dozens of layers that all use the same two,
 * and sizing a cache tries several head dimensions. Objects live as long as the process. */
#ifndef KVP_CODEC_CACHE_H
#define KVP_CODEC_CACHE_H

#include <kvant/calibration.h>
#include <kvant/codec.h>

/* Where a codec is used. */
typedef struct kvp_codec_site {
    const char *spec;
    uint32_t head_dim;
    kvant_role role;
    uint64_t seed;
    const kvant_calibration *calibration; /* or NULL */
    uint32_t layer, kv_head;
} kvp_codec_site;

/* The codec, or NULL with one line in err that names the valid values. Thread-safe. */
const kvant_codec *kvp_codec_get(const kvp_codec_site *site, char *err, size_t errlen);

#endif /* KVP_CODEC_CACHE_H */
