/* eval_rows.h - the results of an evaluation as rows, one per text, configuration and range of
 * positions. */
#ifndef KVANT_TOOLS_EVAL_ROWS_H
#define KVANT_TOOLS_EVAL_ROWS_H

#include "eval_run.h"

/* One row a text (and one of all of them, when there are several), configuration and bin of
 * positions; without a complete chunk none. False after complaining. */
bool eval_print_rows(const eval_run *r, uint32_t n_bins, report_format format);

#endif /* KVANT_TOOLS_EVAL_ROWS_H */
