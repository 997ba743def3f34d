/* calibrated.h - the numbers that a calibration gives to the codec of one (layer, kv head, role).
 * Codecs read calibrations through this file alone. */
#pragma once

#include <kvant/calibration.h>

#include "codec_internal.h"

/* Finds the calibration's entry for this layer, kv head and role. `what` names the wanted numbers
 * in error messages. KVANT_ERR_UNSUPPORTED without a calibration, KVANT_ERR_ARGUMENT when it was
 * made for another shape of model. */
kvant_status kvant_calibrated_entry(const kvant_codec *codec, const kvant_location *location,
                                    kvant_role role, const char *what,
                                    kvant_calibration_entry *entry, const kvant_error *error);

/* Fills the codec's file_center and file_scale when its spec says center=file or norm=file. The
 * centre is the mean. The scale of a channel is sqrt(max |x - centre|), as InnerQ section 4.3
 * defines it. But it is at least 1/256 of the largest channel's, as kvant/cache.h says for
 * norm=first. */
kvant_status kvant_calibrated_fill(kvant_codec *codec, const kvant_location *location,
                                   const kvant_error *error);

/* Applies the option transform=. For keys it puts the calibration's W before the rotation: the
 * matrix with transform=file, its diagonal factors with transform=diagonal. It names them in the
 * canonical spec, presets center=file and drops the family's own norm. For values it only presets
 * center=file. transform=first presets center=first and norm=first and leaves the rest to the
 * cache.
 *
 * Errors as kvant_calibrated_entry; KVANT_ERR_SPEC when the spec also has norm=; KVANT_ERR_FORMAT
 * when the matrix has no good inverse. */
kvant_status kvant_calibrated_transform(kvant_codec *codec, const kvant_common *common,
                                        const kvant_location *location, const kvant_error *error);
