// SPDX-License-Identifier: Apache-2.0
//! A response's body that fails when nothing arrives for too long, and records what arrives.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::Frame;
use kube::client::Body;
use steerage_model::chain;
use tokio::time::{Instant, Sleep, sleep};

use super::connection::{ConnectionState, TransportError};

/// How a line of a watch begins that is an error instead of an event.
const ERROR_LINE: &[u8] = br#"{"type":"ERROR""#;

/// What a response is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Error,
    List,
    /// Perhaps with a streamed list at its start.
    Watch,
}

pub(super) struct Arriving {
    body: Body,
    state: ConnectionState,
    answer: Answer,
    has_data: bool,
    has_ended: bool,
    last: Instant,
    silence: Pin<Box<Sleep>>,
}

impl Arriving {
    pub(super) fn new(body: Body, state: ConnectionState, answer: Answer) -> Self {
        let silence = Box::pin(sleep(state.timing().call));
        Self { body, state, answer, has_data: false, has_ended: false, last: Instant::now(), silence }
    }

    /// The longest silence. A streamed list becomes a watch in the middle, so it is read when the silence is judged.
    fn limit(&self) -> Duration {
        if self.is_watching() { self.state.silence_limit() } else { self.state.timing().call }
    }

    /// Whether this is a watch whose list, if it streams one, is complete.
    fn is_watching(&self) -> bool {
        self.answer == Answer::Watch && !self.state.is_listing()
    }

    fn on_frame(&mut self, frame: &Frame<Bytes>) {
        let is_error = frame.data_ref().is_some_and(|data| data.starts_with(ERROR_LINE));
        self.has_data = true;
        self.last = Instant::now();
        if self.answer != Answer::Error && !is_error {
            self.state.record_data();
        }
    }

    /// The connection ended: perhaps a proxy cuts connections that are silent for less than the limit.
    fn on_end(&self) {
        if !self.has_data {
            self.record_silence();
        }
    }

    /// A list that stays silent says nothing about the watch.
    fn record_silence(&self) {
        if self.is_watching() {
            self.state.on_silence(self.last.elapsed());
        }
    }

    /// Whether this end of the body is one that the library must not take for a normal one.
    fn is_early(&self) -> bool {
        self.answer == Answer::Watch && !self.has_ended && (!self.has_data || self.state.is_listing())
    }
}

impl http_body::Body for Arriving {
    type Data = Bytes;
    type Error = TransportError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, TransportError>>> {
        let this = &mut *self;
        match Pin::new(&mut this.body).poll_frame(context) {
            Poll::Ready(Some(Ok(frame))) => {
                this.on_frame(&frame);
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                this.has_ended = true;
                this.on_end();
                // The library searches the text too.
                let text = chain(&error).replace("unexpected EOF", "unexpected end");
                Poll::Ready(Some(Err(TransportError::Broken(text))))
            }
            Poll::Ready(None) if this.is_early() => {
                this.has_ended = true;
                this.on_end();
                Poll::Ready(Some(Err(TransportError::Empty)))
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => loop {
                let limit = this.limit();
                this.silence.as_mut().reset(this.last + limit);
                ready!(this.silence.as_mut().poll(context));
                // The list may have been completed while the timer ran.
                if this.last.elapsed() >= this.limit() {
                    this.record_silence();
                    return Poll::Ready(Some(Err(TransportError::Silence(limit))));
                }
            },
        }
    }
}
