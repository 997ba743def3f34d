/* weighting.h - the option transform=: a calibrated W for keys, and its inverse for queries. */
#ifndef KVANT_CODEC_WEIGHTING_H
#define KVANT_CODEC_WEIGHTING_H

#include "codec_internal.h"

/* Applies the option: for keys, puts the calibration's W before the rotation: transform=file the
 * matrix, transform=diagonal the factors. Names them in the canonical spec, presets center=file (of
 * values that is all) and drops the family's own norm. Errors as kvant_site_entry; KVANT_ERR_SPEC
 * beside norm=; KVANT_ERR_FORMAT when the matrix has no good inverse. */
kvant_status kvant_weighting_apply(kvant_codec *codec, const kvant_common *common, const kvant_site *site,
                                   const kvant_error *error);

#endif
