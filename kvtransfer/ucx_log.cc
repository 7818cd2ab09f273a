// SPDX-License-Identifier: Apache-2.0
#include "kvtransfer/ucx_log.h"

#include <ucs/debug/log_def.h>

#include <cstdarg>
#include <cstdio>
#include <mutex>

#include "services/base/log.h"

namespace isthmus::transfer {
namespace {

ucs_log_func_rc_t OnRecord(const char*, unsigned, const char*, ucs_log_level_t level,
                           const ucs_log_component_config_t*, const char* message, va_list ap) {
  if (level > UCS_LOG_LEVEL_WARN) return UCS_LOG_FUNC_RC_STOP;
  char text[1024];
  std::vsnprintf(text, sizeof(text), message, ap);
  // UCX calls an error what is one peer's trouble; whoever met it reports a status too.
  Log(level == UCS_LOG_LEVEL_FATAL ? LogLevel::kError : LogLevel::kWarning, text,
      {{"from", "ucx"}});
  return UCS_LOG_FUNC_RC_STOP;
}

}  // namespace

void RouteUcxLog() {
  static std::once_flag once;
  std::call_once(once, [] { ucs_log_push_handler(OnRecord); });
}

}  // namespace isthmus::transfer
