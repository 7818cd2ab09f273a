// SPDX-License-Identifier: Apache-2.0
#include "services/base/stop_signal.h"

#include <csignal>
#include <ctime>

namespace isthmus {
namespace {

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  return signals;
}

}  // namespace

void BlockStopSignals() {
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
}

int WaitForStopSignal(absl::Duration timeout) {
  const sigset_t signals = StopSignals();
  const timespec patience = absl::ToTimespec(timeout);
  const int signal = sigtimedwait(&signals, nullptr, &patience);
  return signal > 0 ? signal : 0;
}

}  // namespace isthmus
