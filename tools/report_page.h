/* report_page.h - the HTML page of `kvant report`: one file that loads nothing. */
#ifndef KVANT_TOOLS_REPORT_PAGE_H
#define KVANT_TOOLS_REPORT_PAGE_H

#include <cjson/cJSON.h>
#include <stdbool.h>

/* Writes the page beside its place and renames it. data is what report_file.h describes. False
 * after complaining; an older page stays then. */
bool report_page_write(const char *path, const cJSON *data);

/* Whether this build has the plotting library; without it pages have tables only. */
bool report_page_has_figures(void);

#endif /* KVANT_TOOLS_REPORT_PAGE_H */
