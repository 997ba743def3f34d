/* feedback.h - error feedback (noise shaping): rounds the numbers of a row one after another. The
 * rounding of a number takes the errors of the preceding numbers into account, so that scores lose
 * least. format.md, "Feedback". */
#pragma once

#include "codebook.h"

/* For keys: puts the matrix that suits feedback before the codec's rotation, and fills
 * codec->feedback. `w` is the calibration's W, inverse is W^-1 (overwritten), and moment is the
 * queries' second moment. All are n x n. KVANT_ERR_MEMORY; KVANT_ERR_FORMAT when the matrices
 * cannot come from a calibration. */
kvant_status kvant_feedback_create(kvant_codec *codec, const double *w, double *inverse,
                                   const float *moment, const kvant_error *error);

/* As kvant_codebook_quantize. */
float kvant_feedback_quantize(const kvant_feedback *feedback, const kvant_codebook *book,
                              const kvant_kernels *kernels, const float *y, uint8_t *codes);

/* Whether every scale that quantize may give the row fits fp16. */
bool kvant_feedback_fits(const kvant_codebook *book, const kvant_kernels *kernels, const float *y);
