//! Encodes and decodes the kubelet's messages as protobuf, with the crate prost. The usual crate for this purpose, tonic-prost,
//! lacks the text of its licence, which a package would have to include.

use std::marker::PhantomData;

use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// The codec of one call, which encodes messages of the type `W` and decodes messages of the type `R`.
pub(crate) struct Protobuf<W, R>(PhantomData<fn() -> (W, R)>);

impl<W, R> Default for Protobuf<W, R> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<W, R> Codec for Protobuf<W, R>
where
    W: Message + 'static,
    R: Message + Default + 'static,
{
    type Encode = W;
    type Decode = R;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self::default()
    }

    fn decoder(&mut self) -> Self {
        Self::default()
    }
}

impl<W: Message, R> Encoder for Protobuf<W, R> {
    type Item = W;
    type Error = Status;

    fn encode(&mut self, message: W, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        message.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }
}

impl<W, R: Message + Default> Decoder for Protobuf<W, R> {
    type Item = R;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<R>, Status> {
        R::decode(buffer).map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}
