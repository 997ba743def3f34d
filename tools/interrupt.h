/* interrupt.h - the first Ctrl-C asks a long command to stop and print what is complete; the second
 * kills it.
 */
#ifndef KVANT_TOOLS_INTERRUPT_H
#define KVANT_TOOLS_INTERRUPT_H

#include <stdbool.h>

void interrupt_catch(void);
bool interrupted(void);

#endif /* KVANT_TOOLS_INTERRUPT_H */
