// SPDX-License-Identifier: Apache-2.0
//! A simulation of three candidates with clocks of different speed, and calls that are delayed, lost, or executed without an
//! answer: never two holders at once.

use std::time::Duration;

use proptest::prelude::*;

use crate::lease::candidate::{Candidate, CandidateStep, LeaseTiming};
use crate::lease::record::LeaseRecord;

/// What happens to a call; times in milliseconds.
#[derive(Clone, Copy, Debug)]
struct CallFaults {
    request_delay: u64,
    answer_delay: u64,
    request_lost: bool,
    answer_lost: bool,
    /// Time that the candidate is suspended before its next step.
    stall: u64,
}

const NO_FAULTS: CallFaults =
    CallFaults { request_delay: 5, answer_delay: 5, request_lost: false, answer_lost: false, stall: 0 };

fn faults() -> impl Strategy<Value = CallFaults> {
    let late = prop_oneof![6 => 1..50u64, 2 => 50..2_500u64, 1 => 2_500..30_000u64];
    let stall = prop_oneof![12 => Just(0u64), 1 => 0..5_000u64, 1 => 5_000..40_000u64];
    (late.clone(), late, prop::bool::weighted(0.15), prop::bool::weighted(0.15), stall).prop_map(
        |(request_delay, answer_delay, request_lost, answer_lost, stall)| CallFaults {
            request_delay,
            answer_delay,
            request_lost,
            answer_lost,
            stall,
        },
    )
}

/// A clock with its speed in thousandths of real time, and its initial value.
#[derive(Clone, Copy, Debug)]
struct SimClock {
    speed: u64,
    start: u64,
}

impl SimClock {
    fn local(self, real: u64) -> Duration {
        Duration::from_micros(self.start * 1000 + real * self.speed)
    }

    fn real(self, local: Duration) -> u64 {
        u64::try_from(local.as_micros()).expect("short").div_ceil(self.speed)
    }
}

#[derive(Clone, Debug)]
enum Request {
    Read,
    Write { over: Option<String> },
}

#[derive(Clone, Debug)]
enum SimEvent {
    /// The candidate takes its next step.
    Wakes,
    /// A request reaches the server.
    Arrives { call: u64, request: Request, sent: Duration, faults: CallFaults },
    /// An answer reaches the candidate, or the call times out.
    Ends { call: u64, answer: CallResult, sent: Duration },
}

#[derive(Clone, Debug)]
enum CallResult {
    Read(Option<LeaseRecord>),
    Wrote(LeaseRecord),
    Failed,
}

struct Simulation {
    timing: LeaseTiming,
    clocks: Vec<SimClock>,
    candidates: Vec<Candidate>,
    /// The call that each candidate waits for.
    waiting: Vec<u64>,
    stored: Option<LeaseRecord>,
    version: u64,
    calls: u64,
    /// Time in milliseconds, candidate and event, in order.
    pending: Vec<(u64, usize, SimEvent)>,
    schedule: Vec<CallFaults>,
    /// No faults from this time on.
    no_faults_from: u64,
    now: u64,
}

impl Simulation {
    fn new(clocks: Vec<SimClock>, schedule: Vec<CallFaults>, no_faults_from: u64) -> Self {
        let timing = LeaseTiming::default();
        let candidates: Vec<_> = clocks
            .iter()
            .enumerate()
            .map(|(index, clock)| Candidate::new(format!("candidate-{index}"), timing, clock.local(0)))
            .collect();
        let pending = (0..candidates.len()).map(|index| (0, index, SimEvent::Wakes)).collect();
        Self {
            timing,
            waiting: vec![0; candidates.len()],
            candidates,
            clocks,
            stored: None,
            version: 0,
            calls: 0,
            pending,
            schedule,
            no_faults_from,
            now: 0,
        }
    }

    fn faults(&self) -> CallFaults {
        if self.now >= self.no_faults_from || self.schedule.is_empty() {
            return NO_FAULTS;
        }
        let at = usize::try_from(self.calls).expect("small") % self.schedule.len();
        self.schedule[at]
    }

    fn local(&self, index: usize) -> Duration {
        self.clocks[index].local(self.now)
    }

    fn holders(&self) -> Vec<usize> {
        let holds = |index: &usize| {
            self.candidates[*index].held_until().is_some_and(|until| self.local(*index) < until)
        };
        (0..self.candidates.len()).filter(holds).collect()
    }

    fn run(&mut self, end: u64) -> Result<(), TestCaseError> {
        loop {
            let next =
                self.pending.iter().enumerate().min_by_key(|(at, (time, ..))| (*time, *at)).map(|(at, _)| at);
            let Some(next) = next.filter(|at| self.pending[*at].0 <= end) else {
                self.now = end;
                return Ok(());
            };
            let (time, index, what) = self.pending.remove(next);
            self.now = time;
            match what {
                SimEvent::Wakes => self.wakes(index),
                SimEvent::Arrives { call, request, sent, faults } => {
                    self.arrives(index, call, &request, sent, faults);
                }
                SimEvent::Ends { call, answer, sent } => self.ends(index, call, answer, sent),
            }
            prop_assert!(self.holders().len() <= 1, "at {} ms: {:?}", self.now, self.holders());
        }
    }

    fn wakes(&mut self, index: usize) {
        let local = self.local(index);
        match self.candidates[index].step(local) {
            CandidateStep::Sleep(wait) => {
                let at = self.clocks[index].real(local + wait) - self.clocks[index].real(local) + self.now;
                self.pending.push((at.max(self.now + 1), index, SimEvent::Wakes));
            }
            CandidateStep::Read => self.send(index, Request::Read, local),
            // The version is of the record that was read or written last, which the candidate keeps.
            CandidateStep::Write => {
                let over = self.candidates[index].version().map(str::to_owned);
                self.send(index, Request::Write { over }, local);
            }
        }
    }

    fn send(&mut self, index: usize, request: Request, sent: Duration) {
        let faults = self.faults();
        self.calls += 1;
        let call = self.calls;
        self.waiting[index] = call;
        if !faults.request_lost {
            self.pending.push((
                self.now + faults.request_delay,
                index,
                SimEvent::Arrives { call, request, sent, faults },
            ));
        }
        let timeout = u64::try_from(self.timing.call.as_millis()).expect("short");
        self.pending.push((
            self.now + timeout,
            index,
            SimEvent::Ends { call, answer: CallResult::Failed, sent },
        ));
    }

    fn arrives(&mut self, index: usize, call: u64, request: &Request, sent: Duration, faults: CallFaults) {
        let answer = match request {
            Request::Read => CallResult::Read(self.stored.clone()),
            Request::Write { over } if *over == self.stored.as_ref().map(|record| record.version.clone()) => {
                self.version += 1;
                let record = LeaseRecord {
                    version: self.version.to_string(),
                    holder: Some(format!("candidate-{index}")),
                    duration: Some(self.timing.duration),
                };
                self.stored = Some(record.clone());
                CallResult::Wrote(record)
            }
            Request::Write { .. } => CallResult::Failed,
        };
        if !faults.answer_lost {
            self.pending.push((self.now + faults.answer_delay, index, SimEvent::Ends { call, answer, sent }));
        }
    }

    fn ends(&mut self, index: usize, call: u64, answer: CallResult, sent: Duration) {
        if self.waiting[index] != call {
            return;
        }
        self.waiting[index] = 0;
        let local = self.local(index);
        let candidate = &mut self.candidates[index];
        match answer {
            CallResult::Read(record) => candidate.observed(record, local),
            CallResult::Wrote(record) => candidate.renewed(record, sent, local),
            CallResult::Failed => candidate.failed(local, 0.5),
        }
        self.pending.push((self.now + self.faults().stall, index, SimEvent::Wakes));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn never_two_holders_and_one_after_faults_end(
        // The fastest is 1.4 times as fast as the slowest; the lease allows for half as fast again.
        clocks in prop::collection::vec((850..1_190u64, 0..100_000_000u64), 3),
        schedule in prop::collection::vec(faults(), 1..60),
    ) {
        let clocks = clocks.into_iter().map(|(speed, start)| SimClock { speed, start }).collect();
        let mut simulation = Simulation::new(clocks, schedule, 300_000);
        simulation.run(400_000)?;
        prop_assert_eq!(simulation.holders().len(), 1, "no holder after the faults ended");
    }
}

#[test]
fn without_faults_the_first_holder_stays() {
    let clocks = vec![SimClock { speed: 1000, start: 0 }; 3];
    let mut simulation = Simulation::new(clocks, Vec::new(), 0);
    simulation.run(100).expect("safe");
    let first = simulation.holders();
    assert_eq!(first.len(), 1);
    simulation.run(600_000).expect("safe");
    assert_eq!(simulation.holders(), first);
}

/// Shows that the simulation can fail: a renew deadline beyond the lease duration allows two holders.
#[test]
fn the_simulation_finds_an_unsafe_deadline() {
    let clocks = vec![
        SimClock { speed: 850, start: 7 },
        SimClock { speed: 1_190, start: 99 },
        SimClock { speed: 1_000, start: 0 },
    ];
    let silence = CallFaults { request_lost: true, ..NO_FAULTS };
    let found = (1..40).any(|good| {
        let schedule: Vec<_> = (0..40).map(|at| if at < good { NO_FAULTS } else { silence }).collect();
        let mut simulation = Simulation::new(clocks.clone(), schedule, 300_000);
        simulation.timing.deadline = simulation.timing.duration * 2;
        for (index, clock) in clocks.iter().enumerate() {
            simulation.candidates[index] =
                Candidate::new(format!("candidate-{index}"), simulation.timing, clock.local(0));
        }
        simulation.run(300_000).is_err()
    });
    assert!(found);
}
