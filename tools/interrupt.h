/* interrupt.h - the first Ctrl-C asks a long command to stop and to print its complete results; the
 * second one kills it. */
#ifndef KVANT_TOOLS_INTERRUPT_H
#define KVANT_TOOLS_INTERRUPT_H

#include <stdbool.h>

void interrupt_catch(void);
bool interrupted(void);

#endif /* KVANT_TOOLS_INTERRUPT_H */
